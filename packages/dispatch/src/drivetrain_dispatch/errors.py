"""The exceptions of this package; their messages name the parameters and the remedy."""

from drivetrain_weights.errors import TiedParametersError as TiedParametersError
from drivetrain_weights.errors import WeightFilesError as WeightFilesError


class DeviceMapError(ValueError):
    """A device map that does not fit the model or the machine."""


class OffloadedError(RuntimeError):
    """An operation that a model with offloaded weights does not support before `remove_hooks(model)`."""


class CostError(RuntimeError):
    """A failure to measure the cost of a model's modules without data."""


class WeightsMismatchError(ValueError):
    """A mismatch between the names or shapes of a checkpoint and those of the model."""


class EngineNotFoundError(ValueError):
    """A name of an engine that no installed package provides."""


class LoadError(RuntimeError):
    """A load that failed midway; the model is unchanged."""
