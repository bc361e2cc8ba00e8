"""The state that all objects of a program for Accelerate share: ranks, precision, plugins, gradients.

Accelerate's programs construct `PartialState()` anywhere and expect the same ranks everywhere. Only this folder keeps
such state; the packages that it is built on have none.
"""
