"""Make all ranks succeed or fail together, over the process group or the store."""
