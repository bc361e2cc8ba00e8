"""Which libraries and devices there are, and in which versions."""
