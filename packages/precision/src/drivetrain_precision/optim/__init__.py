"""Optimizers and precision: in which precision an optimizer keeps its states."""
