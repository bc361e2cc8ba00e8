"""Who am I: ranks, device, mesh, collectives, seeds, rank-aware logging, a watchdog that names the culprit of a hang."""
