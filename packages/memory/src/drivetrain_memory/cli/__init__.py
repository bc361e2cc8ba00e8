"""The commands `drivetrain memory ...`."""
