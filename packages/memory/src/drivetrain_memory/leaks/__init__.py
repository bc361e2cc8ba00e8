"""Leaks: find memory that grows over steps, and name its kind, its holder and the line of its creation."""
