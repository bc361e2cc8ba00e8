"""One file for each platform: what it makes of a run's records, and how it says which of them it has."""
