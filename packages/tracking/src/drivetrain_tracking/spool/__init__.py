"""The spool of a run: every logged value is in a checksummed line on the disk before any platform gets it."""
