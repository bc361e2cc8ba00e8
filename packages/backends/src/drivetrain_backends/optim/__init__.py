"""Wrap optimizers and schedulers, and match them to models."""
