"""Read batches from map-style and iterable datasets, from other loaders, or from rank 0."""
