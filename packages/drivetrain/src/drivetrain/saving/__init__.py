"""Saved and resumed runs, models out to other programs and in."""
