"""Draw random orders and numbers that depend on a key alone."""
