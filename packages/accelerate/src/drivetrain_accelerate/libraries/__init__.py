"""The libraries and devices that there are, and their versions."""
