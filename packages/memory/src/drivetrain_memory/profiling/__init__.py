"""Profiling: traces for each rank, the operations of all ranks in one table, and a flame graph to look at."""
