"""Training without fp32 copies of the weights: how the updates of weights in bf16 are rounded."""
