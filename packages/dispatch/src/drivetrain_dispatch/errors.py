"""The exceptions of this package; their messages name the parameters and the remedy."""


class TiedParametersError(ValueError):
    """An error in tied parameters: the tensors that should be one differ, or are not in the model."""


class DeviceMapError(ValueError):
    """A device map that does not fit the model or the machine."""


class WeightFilesError(ValueError):
    """An error in a model's weight files: they are missing, damaged, or have changed."""


class OffloadedError(RuntimeError):
    """An operation that a model with offloaded weights does not support before `remove_hooks(model)`."""


class CostError(RuntimeError):
    """A failure to measure the cost of a model's modules without data."""


class WeightsMismatchError(ValueError):
    """A mismatch between the names or shapes of a checkpoint and those of the model."""


class LoadError(RuntimeError):
    """A load that failed midway; the model is unchanged."""
