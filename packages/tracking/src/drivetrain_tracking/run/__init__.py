"""The facts of a run: what surrounds it, and how it ended."""
