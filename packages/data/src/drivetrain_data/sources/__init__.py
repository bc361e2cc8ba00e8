"""Read batches from map-style and iterable datasets, from external loaders, or from rank 0."""
