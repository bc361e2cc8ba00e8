"""`drivetrain plan` and `drivetrain estimate`."""
