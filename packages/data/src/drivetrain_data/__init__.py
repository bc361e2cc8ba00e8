"""Shard any DataLoader and resume it exactly, also with another number of processes."""
