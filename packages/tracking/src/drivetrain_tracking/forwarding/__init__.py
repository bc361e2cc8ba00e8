"""Send a run's log to a platform, from a process beside the training: in order, each record once."""
