"""The platforms, a file for each: the form of records on the platform, and the count of those that it holds."""
