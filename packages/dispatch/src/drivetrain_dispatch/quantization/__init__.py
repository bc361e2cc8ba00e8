"""Quantise the weights of linear layers, by the libraries that do it."""
