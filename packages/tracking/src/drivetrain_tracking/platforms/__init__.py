"""The platforms, a file for each: the form of a platform's records, and the count of the records it holds."""
