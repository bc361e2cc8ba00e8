"""Quantise the weights of linear layers with bitsandbytes and torchao, or keep a checkpoint's fp8 weights."""
