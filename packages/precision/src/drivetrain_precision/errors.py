"""Exceptions of choosing a precision and of training in it, and a warning about its use."""


class PrecisionError(ValueError):
    """The device does not support the requested precision, or the precision is unknown."""


class HalfPrecisionWarning(UserWarning):
    """Code computes an operation in half precision that needs fp32."""


class SkippedStepsError(RuntimeError):
    """Too many consecutive steps are skipped; neither a smaller loss scale nor another batch helps.

    Args:
        message: The error and its remedy.
        num_skipped: The number of consecutive skipped steps.
        scale: The loss scale of the last skipped step; None without a loss scale.
        layer: The name of the layer that overflowed first; None if unknown.
    """

    def __init__(self, message: str, *, num_skipped: int, scale: float | None, layer: str | None) -> None:
        super().__init__(message)
        self.num_skipped = num_skipped
        self.scale = scale
        self.layer = layer


class NothingConvertedError(PrecisionError):
    """A recipe can convert no layer of a model."""
