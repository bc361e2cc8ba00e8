"""Prepared optimizers and schedulers, as programs for Accelerate know them."""
