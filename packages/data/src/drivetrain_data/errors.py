"""What can go wrong when data is sharded or resumed."""


class DataError(ValueError):
    """A loader, sampler or shard that cannot be served as asked."""


class ResumeError(ValueError):
    """A saved position that does not fit the loader it is loaded into."""


class AmbiguousLoaderError(RuntimeError):
    """Two loaders are read side by side, and it is not known which one's tail is meant."""
