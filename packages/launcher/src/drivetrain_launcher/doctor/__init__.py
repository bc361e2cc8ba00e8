"""What breaks runs, found in seconds before one starts: checks of each host, of all together, and of their links."""
