"""Stages of layers (pipeline parallelism): which rank holds which, what a stage computes, and in which order."""
