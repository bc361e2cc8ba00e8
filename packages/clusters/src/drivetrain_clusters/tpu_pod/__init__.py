"""The hosts of a TPU slice, each of which runs the same launch."""
