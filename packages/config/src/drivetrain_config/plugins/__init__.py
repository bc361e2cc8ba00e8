"""The objects that installed packages register by entry points."""
