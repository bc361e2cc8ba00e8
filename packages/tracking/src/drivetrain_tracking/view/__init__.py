"""A local page that shows runs from their logs: `drivetrain track view`."""
