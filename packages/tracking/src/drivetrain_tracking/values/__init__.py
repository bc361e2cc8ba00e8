"""Logged values: plain ones, those on a device, records of them, and secrets that are masked."""
