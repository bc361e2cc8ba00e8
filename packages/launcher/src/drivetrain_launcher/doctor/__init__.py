"""The search for what breaks runs: checks of each host, of all hosts together, and of their links, in seconds."""
