"""Read and write memory-mapped weight files, safetensors and PyTorch's own."""
