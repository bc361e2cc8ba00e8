"""The outputs of the linter, one a file."""
