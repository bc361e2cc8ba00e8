"""The batch size: find the largest that fits in memory, on one process or on several in agreement."""
