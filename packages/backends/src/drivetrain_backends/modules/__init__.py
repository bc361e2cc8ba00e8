"""Prepare a model's modules: autocast, compilation, activation checkpointing, batch normalisation."""
