"""Forward a spool to a platform, outside the process that trains."""
