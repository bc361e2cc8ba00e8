"""The facts of a run: its surroundings, and how it ended."""
