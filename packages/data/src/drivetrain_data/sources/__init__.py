"""Read batches from map-style and iterable datasets, from foreign loaders, or from rank 0."""
