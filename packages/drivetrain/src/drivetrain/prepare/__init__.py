"""What becomes of the objects that a program hands to `prepare`."""
