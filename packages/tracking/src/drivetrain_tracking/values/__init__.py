"""Logged values: plain values, values on a device, records of values, and masked secrets."""
