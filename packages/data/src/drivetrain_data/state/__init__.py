"""Save and restore the position of loaders, samplers and streams."""
