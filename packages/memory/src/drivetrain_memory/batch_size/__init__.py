"""The batch size: find one that fits in memory, on one process or on several that agree."""
