"""Data parallel training: a replica of each model on every rank."""
