"""The dataclasses and enums by which a program for Accelerate describes its run."""
