"""Convert a checkpoint to a model's names and shapes while its tensors are read."""
