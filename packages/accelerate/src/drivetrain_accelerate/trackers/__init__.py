"""Trackers in Accelerate's form: the base that programs subclass, and one for each platform."""
