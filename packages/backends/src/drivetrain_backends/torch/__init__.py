"""Train with torch's own autograd: one device, or DistributedDataParallel."""
