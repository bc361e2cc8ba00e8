"""Peak memory of host and accelerator, and the batch size that fits."""
