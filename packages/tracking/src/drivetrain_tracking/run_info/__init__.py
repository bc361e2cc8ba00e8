"""The surroundings of a run: its commit and changes, versions, hardware and command line, without secrets."""
