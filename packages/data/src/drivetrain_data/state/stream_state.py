"""Take snapshots of an iterable dataset or loader from time to time while it is read, and resume from them."""

import logging
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from drivetrain_data.dataset_proxy import DatasetProxy
from drivetrain_data.randomness.generators import load_plain_states, plain_states, seed_global_generators
from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.state.sampler_parts import StatefulReader

logger = logging.getLogger(__name__)

# Taking a snapshot may cost as much as reading many samples; a resume reads those since the last snapshot again.
_SECONDS_BETWEEN = 0.5

PLACEHOLDER = object()  # stands for the samples of a worker that skips its turn


class PositionedSnapshot(NamedTuple):
    """A snapshot of a reader, and the number of samples or batches received from the reader up to the snapshot."""

    received: int
    snapshot: Mapping[str, Any]


@dataclass
class ReadPosition:
    """A position in an epoch that can only be read forwards, by one reader or several workers."""

    epoch: int
    received: list[int]  # from each worker so far: samples, or batches
    snapshots: list[PositionedSnapshot | None]  # each worker's last; what follows is read again
    next_worker: int = 0  # whose turn it is

    @classmethod
    def beginning(cls, epoch: int, num_workers: int = 1) -> "ReadPosition":
        """Return the beginning of an epoch."""
        return cls(epoch, [0] * num_workers, [None] * num_workers)

    def copy(self) -> "ReadPosition":
        """Return an independent copy of the position."""
        return ReadPosition(self.epoch, list(self.received), list(self.snapshots), self.next_worker)

    def move_to(self, epoch: int, position: int) -> None:
        """Move to the beginning of an epoch or, with a single reader, to any position."""
        if not position or epoch != self.epoch:
            self.epoch, self.next_worker = epoch, 0
            self.received = [0] * len(self.received)
            self.snapshots = [None] * len(self.snapshots)
        if len(self.received) == 1:
            self.received = [position]
            # Drop a snapshot beyond the position: the epoch may have been read further before.
            self.snapshots = [it if it and it.received <= position else None for it in self.snapshots]

    def receive(self, advance: int, worker: int, snapshot: Mapping[str, Any] | None) -> None:
        """Move past the samples received from a worker. If its reader gave a snapshot, keep the snapshot."""
        self.received[worker] += advance
        self.next_worker = (worker + 1) % len(self.received)
        if snapshot is not None:
            self.snapshots[worker] = PositionedSnapshot(self.received[worker], snapshot)

    def warn_if_read_again(
        self, position: int, unit: str, *, of: str, reader: str, left_out: str | None
    ) -> None:
        """Warn if a resume must read samples again and drop them: those between the last snapshots and `position`.

        `unit` is the unit of positions in the message. `left_out` is the part that is missing from the reader's own
        state; None if nothing is missing.
        """
        known = sum(it.received for it in self.snapshots if it is not None)
        if known < position:
            logger.warning(
                "going on at %s %d of %s: %s is read and dropped %s%s",
                unit,
                position,
                of,
                reader,
                f"from {unit} {known} on, where its own state ends" if known else "up to there",
                "" if left_out is None else f", since its own state leaves out {left_out}",
            )


class Snapshotter:
    """A taker of periodic snapshots of a dataset or loader and of the global generators that it may use.

    In a worker, the dataset of the worker's `EpochStream` replaces `reader`. A reader that is not `trusted` has an
    incomplete state, and so no snapshots.
    """

    def __init__(self, reader: Any, *, trusted: bool = True) -> None:
        self._reader = reader
        self._is_stateful = trusted  # updated by the first take, because a worker reads its own copy
        self._next_time = 0.0

    def take(self) -> Mapping[str, Any] | None:
        """Return a snapshot after the last sample read; None too soon after the last snapshot or without a state."""
        if not self._is_stateful or time.monotonic() < self._next_time:
            return None
        info: Any = get_worker_info()
        reader = self._reader if info is None else info.dataset._drivetrain_dataset
        if not isinstance(reader, StatefulReader):
            self._is_stateful = False
            return None
        taken = {"reader": deepcopy(reader.state_dict()), "generators": plain_states()}
        self._next_time = time.monotonic() + _SECONDS_BETWEEN
        return taken


class EpochReader:
    """A starter of a dataset's epochs, here or in a worker: it sets epoch, seeds and start position.

    Persistent workers can start only at the beginning of an epoch. A `trusted` dataset has a complete state. Every
    process that reads an epoch calls the `set_epoch` of listeners.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        *,
        num_workers: int,
        stride: int,
        persistent: bool,
        trusted: bool,
        listeners: tuple[Any, ...] = (),
    ) -> None:
        self.stream = stream
        self._listeners = listeners
        self._stride = stride
        self._num_workers = max(1, num_workers)
        self._start = ReadPosition.beginning(0, self._num_workers)
        self._seed_and_epoch = torch.zeros(2, dtype=torch.int64)
        if persistent:
            self._seed_and_epoch.share_memory_()
        self._is_stateful = trusted and isinstance(stream, StatefulReader)
        self._first_state: Any = None  # the dataset's state before this process read anything
        self._has_moved = False  # whether an iteration was left, or started, in the middle of the dataset

    def begin(self, seed: int, epoch: int, start: ReadPosition | None = None) -> None:
        """Set the epoch and start of the next loop. Called before workers start or continue with a new epoch."""
        self._seed_and_epoch[0], self._seed_and_epoch[1] = seed, epoch
        self._start = start or ReadPosition.beginning(epoch, self._num_workers)
        self._set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info else 0
        if worker < self._start.next_worker:
            # Torch's loader asks workers in turn from 0 on: the workers before the first one skip their turn.
            yield from repeat(PLACEHOLDER, self._stride)
        last = self._start.snapshots[worker]
        self._prepare(worker if info else None, last)
        samples = iter(self.stream)
        yield from islice(samples, self._start.received[worker] - (last.received if last else 0), None)
        self._has_moved = last is not None

    def _prepare(self, worker: int | None, last: PositionedSnapshot | None) -> None:
        stream: Any = self.stream
        if self._is_stateful and self._first_state is None:
            self._first_state = deepcopy(stream.state_dict())
        if self._is_stateful and self._has_moved:
            stream.load_state_dict(deepcopy(self._first_state))
        self._has_moved = True
        seed, epoch = self._seed_and_epoch.tolist()
        self._set_epoch(epoch)
        if isinstance(stream, IterDataPipe):
            # As torch's loader does: all workers shuffle alike, and each keeps its part.
            apply_random_seed(stream, torch.Generator().manual_seed(hash_key(seed, epoch)))
            if (info := get_worker_info()) is not None:
                apply_sharding(stream, info.num_workers, info.id)
        if worker is not None:  # without workers, the source swaps the generators around each read
            seed_global_generators(hash_key(seed, epoch, worker))
        if last is not None:
            stream.load_state_dict(deepcopy(last.snapshot["reader"]))
            load_plain_states(last.snapshot["generators"])

    def _set_epoch(self, epoch: int) -> None:
        """Call the `set_epoch` of listeners, before workers start and in each worker that has not called it yet."""
        # Workers of Hugging Face datasets share the epoch set here; setting it again in a worker would change it and
        # make them read another epoch.
        for part in self._listeners:
            if getattr(part, "epoch", None) != epoch:
                part.set_epoch(epoch)


class EpochStream(DatasetProxy, IterableDataset[Any]):
    """A proxy of an iterable dataset whose epochs a reader starts."""

    _drivetrain_reader: EpochReader

    def __init__(self, reader: EpochReader) -> None:
        super().__init__(reader.stream, reader=reader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._drivetrain_reader)

    def __reduce__(self) -> tuple[type["EpochStream"], tuple[Any, ...]]:
        return EpochStream, (self._drivetrain_reader,)
