"""Convert a checkpoint to a model's names and shapes on the fly."""
