"""Draw random orders and numbers that depend only on a key."""
