"""The `drivetrain checkpoint` commands: list, show and verify checkpoints, merge shards, delete old checkpoints."""
