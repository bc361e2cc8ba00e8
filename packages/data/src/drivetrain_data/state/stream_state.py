"""Where an iterable dataset or loader stands: its own state, taken now and then as it is read, and a start there."""

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

# A state may cost as much as many samples to take; those read since the last one are read again.
_SECONDS_BETWEEN = 0.5

PLACEHOLDER = object()  # stands for a sample of a worker whose turn it is not


@runtime_checkable
class StatefulReader(Protocol):
    """An iterable that knows where it stands, as datasets of Hugging Face and loaders of torchdata do."""

    def state_dict(self) -> Mapping[str, Any]:
        """Where the iteration stands."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Let the next iteration go on from there."""
        ...


class Stand(NamedTuple):
    """Where one worker's dataset stood.

    Attributes:
        received: The samples that had come from the worker by then.
        snapshot: What `Snapshots.take` gave.
    """

    received: int
    snapshot: Mapping[str, Any]


class Start(NamedTuple):
    """Where an epoch is begun.

    Attributes:
        received: The samples that each worker gave before.
        stands: Where each worker's dataset stood at some time before; what it gave since then is read and dropped.
        first_worker: Whose turn it is.
    """

    received: tuple[int, ...]
    stands: tuple[Stand | None, ...]
    first_worker: int = 0


class Snapshots:
    """Takes the state of what is read in this process, with that of the generators it may draw from.

    Args:
        reader: The dataset, if it is read without workers; in a worker it is the worker's own. Or a loader.
        trusted: The reader's state says all that it needs to go on; else it is not asked.
    """

    def __init__(self, reader: Any, *, trusted: bool = True) -> None:
        self._reader = reader
        self._is_stateful = trusted  # until looked at: a worker's reader is another one
        self._next_time = 0.0

    def take(self) -> Mapping[str, Any] | None:
        """The states after what was read last; None if it is too early for another, or the reader has none."""
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
    """Begins a dataset's epochs, in this process or in a worker: told of the epoch, seeded, and where it is to start.

    Args:
        stream: The dataset.
        num_workers: That read it; 0 for this process.
        stride: The samples that a worker reads at a time.
        persistent: Workers live on from epoch to epoch; then they cannot be given a start other than the beginning.
        trusted: The dataset's state, if it has one, says all that it needs to go on.
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
        self._first_state: Any = None  # before anything was read in this process
        self._has_moved = False  # it was left in the middle, or started there

    def begin(self, seed: int, epoch: int, start: Start | None = None) -> None:
        """Say what the next loop reads. Called before its workers start, or go on with another epoch."""
        self._seed_and_epoch[0], self._seed_and_epoch[1] = seed, epoch
        self._start = start or self._beginning
        self._tell_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info else 0
        if worker < self._start.first_worker:
            # Workers take turns from 0 on: these let theirs pass.
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
        if worker is not None:  # without workers, the loop itself keeps the program's draws apart
            seed_global_generators(hash_key(seed, epoch, worker))
        if stand is not None:
            stream.load_state_dict(deepcopy(stand.snapshot["reader"]))
            load_plain_states(stand.snapshot["generators"])

    def _tell_epoch(self, epoch: int) -> None:
        """Here before workers start, and in each that has not heard: those of Hugging Face share what was told here.

        Were they told again, they would add to it at once, and read another epoch.
        """
        stream: Any = self.stream
        if hasattr(stream, "set_epoch") and getattr(stream, "epoch", None) != epoch:
            stream.set_epoch(epoch)


def _prepare_pipe(pipe: IterDataPipe[Any], seed: int) -> None:
    """What torch's loader does for its pipes: all workers shuffle alike, and each keeps its part."""
    apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    info = get_worker_info()
    if info is not None:
        apply_sharding(pipe, info.num_workers, info.id)


class EpochStream(IterableDataset[Any]):
    """A dataset as a reader begins it; in all else it answers as the dataset itself, to a worker's set-up too.

    Args:
        reader: The reader.
    """

    def __init__(self, reader: EpochReader) -> None:
        self.__dict__[_READER] = reader

    @staticmethod
    def inside(dataset: Any) -> Any:
        """The dataset itself."""
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


_READER = "_drivetrain_reader"  # a name that no dataset has
