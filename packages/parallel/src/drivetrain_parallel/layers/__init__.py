"""Layers of which each rank holds a part, and the experts that ranks divide."""
