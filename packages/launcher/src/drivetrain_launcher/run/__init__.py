"""Run a launch plan: start processes, monitor them, report failures."""
