"""Compute which samples each shard reads in each step."""
