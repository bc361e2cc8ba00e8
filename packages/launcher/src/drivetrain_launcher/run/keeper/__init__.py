"""The keeper: a process beside the launcher that shows the ranks' output, and ends ranks whose launcher died."""
