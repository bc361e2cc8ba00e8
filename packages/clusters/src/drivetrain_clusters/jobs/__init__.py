"""Follow and cancel submitted jobs, by their records."""

TOPIC = "Run"  # in `drivetrain --help`
