"""What can go wrong when a precision is chosen."""


class PrecisionError(ValueError):
    """The device cannot compute in the precision that was asked for."""
