"""Leaks: find memory that grows over steps, and name what grows, who holds it and which line made it."""
