"""Take gradients from a backward to an optimizer step: accumulation, normalisation, checks."""
