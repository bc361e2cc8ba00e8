"""Look at checkpoints, verify them, merge a model's shards, delete what is old."""
