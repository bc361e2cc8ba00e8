"""Hosts that meet over a store: who is there, how clocks and versions differ, and who can reach whom."""
