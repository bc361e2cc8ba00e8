"""What the doctor found, as a table for people and as JSON for programs."""
