"""Where an iterable dataset or loader stands: its own state, taken now and then as it is read, and a start there."""

import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, get_worker_info

from drivetrain_data.rng import load_plain_states, plain_states

# A state may cost as much as many samples to take; those read since the last one are read again.
_SECONDS_BETWEEN = 0.5


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


class Snapshots:
    """Takes the state of what is read in this process, with that of the generators it may draw from.

    Args:
        reader: The dataset, if it is read without workers; in a worker it is the worker's own. Or a loader.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._is_stateful = True  # until looked at: a worker's reader is another one
        self._next_time = 0.0

    def take(self) -> Mapping[str, Any] | None:
        """The states after what was read last; None if it is too early for another, or the reader has none."""
        if not self._is_stateful or time.monotonic() < self._next_time:
            return None
        info = get_worker_info()
        reader = self._reader if info is None else info.dataset
        if not isinstance(reader, StatefulReader):
            self._is_stateful = False
            return None
        taken = {"reader": deepcopy(reader.state_dict()), "generators": plain_states()}
        self._next_time = time.monotonic() + _SECONDS_BETWEEN
        return taken


class ResumedStream(IterableDataset[Any]):
    """A dataset without the samples that each worker gave before; in all else it answers as the dataset itself.

    Args:
        stream: The dataset.
        received: The samples that each worker gave.
        stands: Where each worker's dataset stood at some time before; what it gave since then is read and dropped.
    """

    def __init__(
        self, stream: IterableDataset[Any], received: tuple[int, ...], stands: tuple[Stand | None, ...]
    ) -> None:
        self.__dict__.update(_stream=stream, _received=received, _stands=stands)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info else 0
        dropped, stand = self._received[worker], self._stands[worker]
        if stand is not None:
            self._stream.load_state_dict(stand.snapshot["reader"])
            load_plain_states(stand.snapshot["generators"])
            dropped -= stand.received
        yield from islice(iter(self._stream), dropped, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_stream"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_stream"], name, value)

    def __reduce__(self) -> tuple[type["ResumedStream"], tuple[Any, ...]]:
        return ResumedStream, (
            self.__dict__["_stream"],
            self.__dict__["_received"],
            self.__dict__["_stands"],
        )
