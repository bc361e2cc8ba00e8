"""What surrounds a run, and how it ended."""
