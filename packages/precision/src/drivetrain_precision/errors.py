"""Exceptions raised when a precision is chosen or training in it fails, and warnings of how it is used."""


class PrecisionError(ValueError):
    """The device does not support the requested precision, or the precision is unknown."""


class HalfPrecisionWarning(UserWarning):
    """Code computes in half precision what needs fp32."""


class SkippedStepsError(RuntimeError):
    """Steps are skipped one after another, and neither a smaller loss scale nor another batch helps.

    Args:
        message: The error and its remedy.
        num_skipped: The number of steps skipped one after another.
        scale: The loss scale of the last one; None without a loss scale.
        layer: The name of the layer that overflowed first; None if it could not be told.
    """

    def __init__(self, message: str, *, num_skipped: int, scale: float | None, layer: str | None) -> None:
        super().__init__(message)
        self.num_skipped = num_skipped
        self.scale = scale
        self.layer = layer


class NothingConvertedError(PrecisionError):
    """A recipe can convert no layer of a model."""
