"""Watch the memory of a program, from outside it."""

TOPIC = "Watch"  # in `drivetrain --help`
