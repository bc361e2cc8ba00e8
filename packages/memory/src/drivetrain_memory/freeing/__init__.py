"""Freeing: the memory of objects, caches and the heap goes back to the system."""
