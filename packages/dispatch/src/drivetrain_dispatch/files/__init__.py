"""Read and write weight files, safetensors and PyTorch's own, mapped into memory."""
