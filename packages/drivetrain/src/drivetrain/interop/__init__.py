"""Names of Accelerate, and what they are called here."""
