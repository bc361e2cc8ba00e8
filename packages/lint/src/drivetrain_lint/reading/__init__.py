"""Scripts, notebooks and modules, read and parsed without running them."""
