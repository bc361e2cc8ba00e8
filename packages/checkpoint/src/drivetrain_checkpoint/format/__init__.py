"""Define the files of a checkpoint: names, manifest, tensors, checksums and plain values."""
