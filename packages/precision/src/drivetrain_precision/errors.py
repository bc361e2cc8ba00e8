"""Exceptions raised when a precision is chosen, and warnings of how it is used."""


class PrecisionError(ValueError):
    """The device does not support the requested precision, or the precision is unknown."""


class HalfPrecisionWarning(UserWarning):
    """Code computes in half precision what needs fp32."""


class NothingConvertedError(PrecisionError):
    """A recipe can convert no layer of a model."""
