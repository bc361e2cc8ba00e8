"""Plan the bytes that each rank writes and reads."""
