"""Read the checkpoints of other libraries."""
