"""The dataclasses and enums with which a program for Accelerate says how it wants to run."""
