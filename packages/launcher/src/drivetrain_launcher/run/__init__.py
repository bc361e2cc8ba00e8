"""Carry out a launch plan: start processes, watch them, report failures."""
