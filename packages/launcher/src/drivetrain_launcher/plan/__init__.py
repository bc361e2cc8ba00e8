"""Plan a launch: which command runs on which rank, with which environment."""
