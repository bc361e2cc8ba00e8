"""The launcher's own subcommands, one per module, whose first docstring line appears in `drivetrain --help`."""
