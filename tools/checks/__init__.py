"""What `tools/check.py` runs: one module a check, each a function from the repository's root to its findings."""
