"""Ranks that are forked off a process which has imported their large modules, once for all ranks and restarts."""
