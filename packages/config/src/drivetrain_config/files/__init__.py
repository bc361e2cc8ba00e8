"""The files that hold settings: where they are found, and how they are read."""
