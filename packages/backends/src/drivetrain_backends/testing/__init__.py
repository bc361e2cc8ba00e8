"""Test a backend against a plain training loop."""

from drivetrain_backends.testing.contract import BackendContract

__all__ = ["BackendContract"]
