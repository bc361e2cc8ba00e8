"""Pictures of a run's memory: one HTML page that needs nothing else, and a plot."""
