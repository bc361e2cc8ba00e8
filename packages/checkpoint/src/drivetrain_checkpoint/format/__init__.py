"""The file format of checkpoints: names, manifest, tensors, checksums and plain values."""
