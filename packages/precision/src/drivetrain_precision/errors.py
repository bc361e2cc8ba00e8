"""Exceptions raised when a precision is chosen."""


class PrecisionError(ValueError):
    """The device does not support the requested precision, or the precision is unknown."""
