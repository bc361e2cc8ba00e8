"""The settings files, flags, names and saved runs that users bring from Accelerate, read for the other packages."""
