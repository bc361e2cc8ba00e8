"""Models larger than a device: their sizes, device maps, loading, dispatch, and the hooks of their modules."""
