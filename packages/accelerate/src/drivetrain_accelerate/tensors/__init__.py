"""Nested tensors: apply functions to them, move them, and exchange them between ranks."""
