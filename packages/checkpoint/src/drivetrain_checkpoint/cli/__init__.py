"""List, show, verify, merge and delete checkpoints."""

TOPIC = "Checkpoints"  # in `drivetrain --help`
