"""Trackers in Accelerate's form: a base class for programs, and a tracker for each platform."""
