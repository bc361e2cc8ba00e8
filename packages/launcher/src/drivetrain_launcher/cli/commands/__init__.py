"""The launcher's own subcommands, one a module; the module's first line is its line in `drivetrain --help`."""
