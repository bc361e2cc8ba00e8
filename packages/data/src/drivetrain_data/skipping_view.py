"""A view of a sharded loader that skips the first batches of each loop."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic

from drivetrain_data.loader import Batch, ShardedLoader


class SkippedBatches(Generic[Batch]):
    """A view of a sharded loader that skips the first batches of each loop and forwards all other attributes."""

    def __init__(self, loader: ShardedLoader[Batch], num_batches: int) -> None:
        self.loader = loader
        self.num_batches = num_batches
        self._length: int | None = None  # the number of steps of the running loop

    def __iter__(self) -> Iterator[Batch]:
        self._length = None
        with suppress(TypeError):
            self._length = len(self)
        yield from self.loader.skipping(self.num_batches)
        self._length = None

    def __len__(self) -> int:
        if self._length is not None and self.loader.current is not None:
            return self._length
        return max(0, self.loader.num_left() - self.num_batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def skip_first_batches(loader: Iterable[Batch], num_batches: int = 0) -> SkippedBatches[Batch]:
    """Skip the first batches of a sharded loader's epochs on this rank. If the order can be computed, none is read.

    TypeError if the loader is not sharded; ResumedLoaderError if a state was loaded in the middle of an epoch, from
    where the loader continues already.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from drivetrain_data import Shard, shard_loader
        >>> loader = shard_loader(DataLoader(range(6), batch_size=2), Shard(0, 1))
        >>> [batch.tolist() for batch in skip_first_batches(loader, 2)]
        [[4, 5]]
    """
    if type(num_batches) is not int or num_batches < 0:
        raise ValueError(f"num_batches={num_batches!r}: must be an integer, 0 or more batches")
    if isinstance(loader, SkippedBatches):
        loader.loader.check_skippable(num_batches)
        return SkippedBatches(loader.loader, loader.num_batches + num_batches)
    if not isinstance(loader, ShardedLoader):
        raise TypeError(
            f"skip_first_batches takes what prepare or shard_loader returned, not {type(loader).__name__}; prepare "
            "or shard it first"
        )
    loader.check_skippable(num_batches)
    return SkippedBatches(loader, num_batches)
