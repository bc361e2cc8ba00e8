"""Inspect a model: its tensors, their sizes and ties, and the units that are fetched together."""
