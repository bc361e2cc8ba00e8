"""Checkpoints in Accelerate's own layout of files, for programs that read and write them beside `save_state`."""
