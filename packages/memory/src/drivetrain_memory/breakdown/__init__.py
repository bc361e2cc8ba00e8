"""Where the memory of a model went: parameters, gradients, optimizer states, buffers, activations, by module."""
