"""Exceptions raised while ranks share a dataset."""


class DataStateError(ValueError):
    """A saved position does not fit the loader: the dataset, order or sampler differs, or its format is newer."""


class IndexRangeError(ValueError):
    """A sampler returned an index that is not in the dataset."""


class TrimError(ValueError):
    """A gathered value has rows that cannot be attributed to the samples of a rank."""


class AmbiguousLoaderError(RuntimeError):
    """Two loaders are read in turns, and a call does not say which loader's batch it means."""


class DispatchError(RuntimeError):
    """Another rank failed or exited. If the reading rank failed, the message shows its traceback."""


class ResumedLoaderError(RuntimeError):
    """A call skips batches of an epoch, but a loaded state already resumes this epoch in the middle."""


class UnpreparedLoaderError(RuntimeError):
    """A value computed from an unsharded loader is gathered as if each rank had read a shard."""


def stop_let_out(who: str) -> RuntimeError:
    """Return the error to raise when `who` raises StopIteration, since a loop would take that for its own end."""
    return RuntimeError(
        f"{who} raised StopIteration: a loop would end its epoch and skip the remaining samples. "
        "The usual cause is next() of an iterator that has ended: give next() a default, or create a new iterator"
    )
