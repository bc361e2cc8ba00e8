"""What can go wrong, as exceptions that name the parameters and the way out."""


class TiedParametersError(ValueError):
    """Names that are to share one parameter do not fit together, or are not in the model."""


class DeviceMapError(ValueError):
    """A map of devices does not fit the model or the machine."""


class WeightFilesError(ValueError):
    """The files of a model's weights are missing, damaged, or no longer what they were."""


class OffloadedError(RuntimeError):
    """Something was asked of a model whose weights are offloaded that it cannot do until remove_hooks(model)."""


class CostError(RuntimeError):
    """What a model's parts do in a forward cannot be measured without data."""


class WeightsMismatchError(ValueError):
    """The names or shapes of a checkpoint are not those of the model."""


class LoadError(RuntimeError):
    """A load ended on the way, and the model is as it was."""
