"""Gather and shard the states of models and optimizers."""
