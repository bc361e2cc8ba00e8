"""The launcher's own subcommands, one per module, whose first docstring line appears in `drivetrain --help`."""

TOPIC = "Set up"  # in `drivetrain --help`, unless a module has its own
