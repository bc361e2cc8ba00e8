"""Hosts that meet over a store: which have come, how clocks and versions differ, and which can reach each other."""
