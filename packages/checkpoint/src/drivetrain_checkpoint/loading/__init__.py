"""Find, verify and load checkpoints."""
