"""What `tools/check.py` runs: one room a check, each a function from the repository's root to its findings."""
