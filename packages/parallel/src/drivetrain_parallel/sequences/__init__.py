"""Sequences of which each rank holds positions: a model's blocks, and attention inside them."""
