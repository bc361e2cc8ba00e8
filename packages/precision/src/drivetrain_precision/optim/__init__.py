"""Optimizers and precision: updates of weights held in bf16, and the precision of optimizer states."""
