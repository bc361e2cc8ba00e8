"""The memory of a model by kind: parameters, gradients, optimizer states, buffers, activations, by module."""
