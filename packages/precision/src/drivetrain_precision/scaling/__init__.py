"""Keep half-precision gradients in range: the loss scale, skipped steps, and what overflowed or underflowed where."""
