"""The exceptions of this package; their messages name the file or the parameters, and the remedy."""


class WeightFilesError(ValueError):
    """An error in a model's weight files: they are missing, damaged, or have changed."""


class NoWeightsError(WeightFilesError):
    """A folder that holds no weights, or only shards without their index."""


class SeveralWeightsError(WeightFilesError):
    """A folder that holds several models' weights, none under a usual name."""


class UnsafePickleError(WeightFilesError):
    """A file of `torch.save` that could run code when it is read.

    Attributes:
        found: The names of the functions and classes that the file would import, joined by commas.
    """

    def __init__(self, message: str, *, found: str) -> None:
        super().__init__(message)
        self.found = found


class TiedParametersError(ValueError):
    """An error in tied parameters: tensors to tie differ, or are not in the model."""
