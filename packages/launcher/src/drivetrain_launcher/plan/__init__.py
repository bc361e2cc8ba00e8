"""Plan a launch: the command and environment of every rank."""
