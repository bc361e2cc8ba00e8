"""Prepared optimizers, schedulers, engines and loss scales, in the form that programs for Accelerate expect."""
