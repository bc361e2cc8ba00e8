"""The program of one rank, run on tensors without data: what it allocates, computes and sends."""
