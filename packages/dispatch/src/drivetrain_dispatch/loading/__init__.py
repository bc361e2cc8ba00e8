"""Load a checkpoint into a model: plan, check, read, then assign."""
