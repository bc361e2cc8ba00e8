"""The spool of a run: every logged value is a checksummed line on the disk before any platform hears of it."""
