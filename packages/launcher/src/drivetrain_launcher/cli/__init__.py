"""Parse the command line, in our flags and in those of Accelerate and torchrun."""
