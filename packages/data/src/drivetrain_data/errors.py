"""What can go wrong between a dataset and the ranks that share it."""


class DataStateError(ValueError):
    """A saved position does not fit the loader: another dataset, order, sampler, or a newer format."""


class IndexRangeError(ValueError):
    """A sampler gave an index that the dataset does not have."""


class TrimError(ValueError):
    """Which rows of a gathered value belong to which rank's samples is not certain."""


class AmbiguousLoaderError(RuntimeError):
    """Two loaders are read side by side, and it is not clear whose batch is meant."""


class DispatchError(RuntimeError):
    """Another rank failed or ended: the one that reads for all, whose traceback is told, or one it serves."""


class ResumedLoaderError(RuntimeError):
    """Batches are to be left out of an epoch whose first ones a loaded state has left out already."""


class UnpreparedLoaderError(RuntimeError):
    """What was computed from a loader that every rank reads whole is to be gathered as if each read a part."""
