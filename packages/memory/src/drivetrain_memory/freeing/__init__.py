"""Freeing: give memory back, of objects, of caches and of the heap."""
