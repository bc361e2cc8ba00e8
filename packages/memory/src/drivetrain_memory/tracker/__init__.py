"""The memory of a run over time: samples, phases, and a summary of each rank."""
