"""The state that all objects of a program for Accelerate share: ranks, how the run trains, and gradients.

Accelerate's programs construct `PartialState()` anywhere and expect the same ranks everywhere. This folder alone
keeps such state; the packages below have none.
"""
