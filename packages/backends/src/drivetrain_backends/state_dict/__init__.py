"""Gather and divide the states of models and optimizers whose tensors are sharded."""
