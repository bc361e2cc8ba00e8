"""Take the state of an iterable dataset or loader from time to time as it is read, and resume from such a state."""

import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice, repeat
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from drivetrain_data.randomness.generators import load_plain_states, plain_states, seed_global_generators
from drivetrain_data.randomness.permutation import hash_key

# Taking a snapshot may cost as much as reading many samples; a resume reads those since the last snapshot again.
_SECONDS_BETWEEN = 0.5

PLACEHOLDER = object()  # stands for the samples of a worker that skips its turn


@runtime_checkable
class StatefulReader(Protocol):
    """An iterable with a state dict, such as Hugging Face's datasets and torchdata's loaders."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the iteration."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state from which the next iteration continues."""
        ...


class Stand(NamedTuple):
    """A snapshot of one worker's dataset, with its position.

    Attributes:
        received: The number of samples received from the worker up to the snapshot.
        snapshot: The snapshot from `Snapshots.take`.
    """

    received: int
    snapshot: Mapping[str, Any]


class Start(NamedTuple):
    """The point at which an epoch is started or resumed.

    Attributes:
        received: The number of samples received from each worker so far.
        stands: The last snapshot of each worker's dataset, or None; samples since then are read again and dropped.
        first_worker: The index of the worker whose turn it is.
    """

    received: tuple[int, ...]
    stands: tuple[Stand | None, ...]
    first_worker: int = 0


class Snapshots:
    """The snapshots of a dataset or loader, taken from time to time, with the global generators that it may use.

    Args:
        reader: The loader, or the dataset if it is read without workers; a worker uses its own dataset instead.
        trusted: Whether the reader's state is complete; if not, no snapshots are taken.
    """

    def __init__(self, reader: Any, *, trusted: bool = True) -> None:
        self._reader = reader
        self._is_stateful = trusted  # updated by the first take, because a worker reads its own copy
        self._next_time = 0.0

    def take(self) -> Mapping[str, Any] | None:
        """Return a snapshot after the last sample read; None if it is too early for another, or there is no state."""
        if not self._is_stateful or time.monotonic() < self._next_time:
            return None
        info: Any = get_worker_info()
        reader = self._reader if info is None else EpochStream.inside(info.dataset)
        if not isinstance(reader, StatefulReader):
            self._is_stateful = False
            return None
        taken = {"reader": deepcopy(reader.state_dict()), "generators": plain_states()}
        self._next_time = time.monotonic() + _SECONDS_BETWEEN
        return taken


class EpochReader:
    """A reader that starts a dataset's epochs, in this process or a worker: sets the epoch, the seeds and the start.

    Args:
        stream: The iterable dataset to read.
        num_workers: The number of workers that read the dataset; 0 for this process.
        stride: The number of samples that a worker reads at a time.
        persistent: Whether workers persist across epochs; they can then start only at the beginning of an epoch.
        trusted: Whether the dataset's state, if it has one, is complete.
    """

    def __init__(
        self, stream: IterableDataset[Any], *, num_workers: int, stride: int, persistent: bool, trusted: bool
    ) -> None:
        self.stream = stream
        self._stride = stride
        self._beginning = Start((0,) * max(1, num_workers), (None,) * max(1, num_workers))
        self._start = self._beginning
        self._seed_and_epoch = torch.zeros(2, dtype=torch.int64)
        if persistent:
            self._seed_and_epoch.share_memory_()
        self._is_stateful = trusted and isinstance(stream, StatefulReader)
        self._first_state: Any = None  # the dataset's state before this process read anything
        self._has_moved = False  # whether an iteration was left, or started, in the middle of the dataset

    def begin(self, seed: int, epoch: int, start: Start | None = None) -> None:
        """Set what the next loop reads. Called before its workers start, or continue with another epoch."""
        self._seed_and_epoch[0], self._seed_and_epoch[1] = seed, epoch
        self._start = start or self._beginning
        self._tell_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info else 0
        if worker < self._start.first_worker:
            # Torch's loader asks workers in turn from 0 on: the workers before the first one skip their turn.
            yield from repeat(PLACEHOLDER, self._stride)
        stand = self._start.stands[worker]
        self._prepare(worker if info else None, stand)
        samples = iter(self.stream)
        yield from islice(samples, self._start.received[worker] - (stand.received if stand else 0), None)
        self._has_moved = stand is not None

    def _prepare(self, worker: int | None, stand: Stand | None) -> None:
        stream: Any = self.stream
        if self._is_stateful and self._first_state is None:
            self._first_state = deepcopy(stream.state_dict())
        if self._is_stateful and self._has_moved:
            stream.load_state_dict(deepcopy(self._first_state))
        self._has_moved = True
        seed, epoch = self._seed_and_epoch.tolist()
        self._tell_epoch(epoch)
        if isinstance(stream, IterDataPipe):
            _prepare_pipe(stream, hash_key(seed, epoch))
        if worker is not None:  # without workers, the source swaps the generators around each read
            seed_global_generators(hash_key(seed, epoch, worker))
        if stand is not None:
            stream.load_state_dict(deepcopy(stand.snapshot["reader"]))
            load_plain_states(stand.snapshot["generators"])

    def _tell_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch` before workers start, and in each worker that does not know the epoch yet.

        Workers of Hugging Face datasets share the epoch set here; setting it again in a worker would change it and
        make them read another epoch.
        """
        stream: Any = self.stream
        if hasattr(stream, "set_epoch") and getattr(stream, "epoch", None) != epoch:
            stream.set_epoch(epoch)


def _prepare_pipe(pipe: IterDataPipe[Any], seed: int) -> None:
    """Seed and shard a pipe as torch's loader does: all workers shuffle alike, and each keeps its part."""
    apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    info = get_worker_info()
    if info is not None:
        apply_sharding(pipe, info.num_workers, info.id)


class EpochStream(IterableDataset[Any]):
    """A dataset that a reader iterates; all other attributes are those of the reader's own dataset.

    This includes attributes that a worker's `worker_init_fn` reads or sets.

    Args:
        reader: The reader of the dataset.
    """

    def __init__(self, reader: EpochReader) -> None:
        self.__dict__[_READER] = reader  # bypasses __setattr__, which writes to the user's dataset

    @staticmethod
    def inside(dataset: Any) -> Any:
        """Return the user's dataset inside an `EpochStream`, or any other dataset unchanged."""
        reader = vars(dataset).get(_READER) if isinstance(dataset, EpochStream) else None
        return dataset if reader is None else reader.stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__[_READER])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__[_READER].stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__[_READER].stream, name, value)

    def __reduce__(self) -> tuple[type["EpochStream"], tuple[Any, ...]]:
        return EpochStream, (self.__dict__[_READER],)


_READER = "_drivetrain_reader"  # an attribute name that no dataset uses
