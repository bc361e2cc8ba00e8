"""The platforms, a file for each: what it makes of a run's records, and how it says which of them it has."""
