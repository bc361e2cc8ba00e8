"""Checkpoints in Accelerate's own layout of files, for programs that do not only use `save_state`."""
