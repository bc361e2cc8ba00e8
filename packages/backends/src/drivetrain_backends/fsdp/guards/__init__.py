"""The guards against what FSDP would train wrongly, drop, or fail on with a cryptic error."""
