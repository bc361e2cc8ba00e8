"""The memory of a training step, measured without memory: weights, gradients, optimizer states, activations."""
