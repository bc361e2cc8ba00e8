"""A sharded loader for a training loop: the batches of one shard on the rank's device, and the plan of each batch."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from drivetrain_data.active_loaders import LoaderTracker
from drivetrain_data.compat import fingerprint_of
from drivetrain_data.device_prefetch import DeviceCopies
from drivetrain_data.errors import ResumedLoaderError
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.settings import UnevenPolicy
from drivetrain_data.shard import Shard
from drivetrain_data.sources.batch_source import BatchSource
from drivetrain_data.sources.first_samples import ComparingOpener
from drivetrain_data.sources.rank0_dispatch import Rank0Dispatch
from drivetrain_data.state.loader_state import STATE_FORMAT, check_state

Batch = TypeVar("Batch")
# Each step's plan, batch and origin, handed on in order.
WatchReads: TypeAlias = Callable[[Iterator[tuple[BatchPlan, Any, Any]]], Iterator[tuple[BatchPlan, Any, Any]]]


@dataclass(slots=True, eq=False)
class _Cursor:
    """The position of one loop. Choosing an epoch and a position creates it; afterwards only the loop moves it."""

    epoch: int
    position: int  # received so far
    stepped: int  # the position of the last mark_stepped; an optimizer has stepped on all before it
    stepped_extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    repeats: int = 0  # how far the epoch had been received beyond a loaded position, without a step
    num_moves: int = 0  # calls of `move_to` before it: a running loop does not go on after another one
    is_begun: bool = False  # by a loop, so that the next loop reads the next epoch
    is_finished: bool = False

    def next_loop(self) -> tuple[int, int]:
        """Return the epoch and the position from which the next loop reads."""
        return (self.epoch + 1, 0) if self.is_begun else (self.epoch, self.position)


class ShardedLoader(Generic[Batch]):
    """A shard of a loader. Create it with `shard_loader`.

    Each loop over the loader is an epoch: the first loop reads `epoch`, and each later one the next epoch unless
    `set_epoch` chooses another. After `load_state_dict`, the first loop reads the rest of the saved epoch.

    Attributes:
        batch_size: The number of samples in a batch on each shard; None if the user's batches are distributed whole.
        current: The plan of the batch yielded last; None outside a loop.
        num_received: The number of batches yielded in all loops so far.
        is_measured: Whether the program has asked for the loader's length.
        is_trained: Whether an optimizer has stepped in a loop over this loader.
        may_interleave: Whether loops may run in turns, each from its own position; the loader's position is that of
            the loop advanced last. By default False: a loop raises an error once another loop has begun.
        watch: A generator function that passes on the readings and measures how long a loop waits; may be None.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        dispatch: Rank0Dispatch | None,
        copies: DeviceCopies | None,
        activity: LoaderTracker | None,
        on_batch: Callable[[], None] | None,
        seed_source: str = "",
    ) -> None:
        self.dataset: Any = source.dataset
        self.shard: Shard = source.sharding.shard
        self.batch_size = source.batch_size
        self.current: BatchPlan | None = None
        self.num_received = 0
        self.is_measured = self.is_trained = False
        self.seed_source = seed_source
        self.source = source
        self._sources: dict[UnevenPolicy, BatchSource] = {source.sharding.even: source}
        self._dispatch, self._copies = dispatch, copies
        self._activity = activity
        self.watch: WatchReads | None = None
        self._on_batch = on_batch
        self._cursor = _Cursor(epoch=0, position=0, stepped=0)
        self._running: _Cursor | None = None  # that of the newest loop, if it has not ended
        self._opener = ComparingOpener(source)
        self.may_interleave = False

    @property
    def epoch(self) -> int:
        """The current epoch or, between loops, the last epoch; before the first loop, the next epoch."""
        return self._cursor.epoch

    @property
    def seed(self) -> int:
        """The seed of the order, which is derived from seed and epoch; loading a state sets the saved seed."""
        return self.source.seed

    @property
    def order_source(self) -> str:
        """The origin of the order, as a phrase for users."""
        source = self.source.order_source
        return source if self._dispatch is None else self._dispatch.describe(source)

    @property
    def total_batch_size(self) -> int | None:
        """The number of samples in a step over all shards; None if the user's batches are distributed whole."""
        return None if self.batch_size is None else self.batch_size * self.shard.count

    @property
    def position(self) -> int:
        """The number of samples received in the current epoch; of batches if the user's are distributed whole."""
        return self._cursor.position

    def position_after(self, num_batches: int) -> int:
        """Return the position in an epoch after each shard has read `num_batches` batches."""
        return num_batches * self.source.stride

    @property
    def even(self) -> UnevenPolicy:
        """The current treatment of the tails of epochs."""
        return self.source.sharding.even

    @property
    def splits_batches(self) -> bool:
        """True if the batch size of the user's loader is the sum over shards."""
        return self.source.sharding.split

    @property
    def is_dispatched(self) -> bool:
        """True if one rank reads the data and sends the other ranks their batches."""
        return self._dispatch is not None

    @property
    def is_resumed(self) -> bool:
        """True if the next loop continues an epoch from a loaded state, instead of beginning a new epoch."""
        return (self.position > 0 or self._cursor.repeats > 0) and not self._cursor.is_begun

    def __len__(self) -> int:
        """Return the number of steps in a full epoch, the same on all ranks; TypeError if the number is unknown."""
        self.is_measured = True
        return self.source.num_steps(self.epoch, 0)

    def num_left(self) -> int:
        """Return the number of steps of the next loop: the rest of the epoch after a resume, else `len(self)`."""
        # Ask only about the epoch being read: asking a sampler about another epoch would reseed it.
        return self.source.num_steps(self.epoch, self._cursor.next_loop()[1])

    def __repr__(self) -> str:
        return (
            f"ShardedLoader(shard {self.shard.index} of {self.shard.count}, batch_size={self.batch_size}, "
            f"epoch {self.epoch}, position {self.position}: {self.order_source})"
        )

    def __iter__(self) -> Iterator[Batch]:
        return self.skipping(0)

    def skipping(self, num_batches: int) -> Iterator[Batch]:
        """Iterate over the next epoch without its first batches; see `check_skippable`. Called on all ranks."""
        self.check_skippable(num_batches)
        return self._loop(num_batches)

    def check_skippable(self, num_batches: int) -> None:
        """Raise ResumedLoaderError for `num_batches` above 0 if a loaded state resumes the epoch in the middle."""
        if num_batches and self.is_resumed:
            raise ResumedLoaderError(
                f"a loaded state has brought this loader to position {self.position} of epoch {self.epoch}, where "
                f"its next loop continues: skip_first_batches({num_batches}) would leave {num_batches} more batches "
                "unread. Delete the call and loop over the loader itself; to begin the epoch again instead, "
                f"call loader.set_epoch({self.epoch + 1}) and loader.set_epoch({self.epoch}) first"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next loop. If a loaded state resumes the same epoch, its position is kept."""
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch={epoch!r}: must be an integer of at least 0")
        if epoch != self.epoch or self._cursor.is_begun:
            self.move_to(epoch, 0)

    def move_to(self, epoch: int, position: int) -> None:
        """Choose the epoch and the position of the next loop. Called on all ranks."""
        self._start(epoch, position)
        self._cursor.num_moves += 1

    @contextmanager
    def treating_tails(self, even: UnevenPolicy) -> Generator[None]:
        """Treat the tails of epochs by `even` inside the block. Called on all ranks, outside a loop.

        A loader with "drop" keeps dropping its tails. ValueError if the loader's batches do not allow `even`.
        """
        if self.current is not None:
            raise RuntimeError(
                f"treating_tails({even!r}): a loop over this loader is running; leave it first"
            )
        before = self.source
        if even not in self._sources:
            self._sources[even] = before.with_even(even)
        self._read_from(self._sources[even])
        try:
            yield
        finally:
            if self.current is not None:
                self._end_loop()
            self._read_from(before)

    def _read_from(self, source: BatchSource) -> None:
        """Read the next loop from another source of the same data, from the same position."""
        epoch, position = self._cursor.next_loop()
        if source is not self.source:
            source.seed = self.source.seed
            source.load_extra_state(epoch, self.source.extra_state(epoch, position))
            self.source = source

    def mark_stepped(self) -> None:
        """Record that an optimizer has stepped on every batch received so far.

        Do not fetch the next batch before stepping on the current one, or the fetched batch counts as stepped on. To
        overlap reading with computation, let the loader read ahead (`copy_ahead`, `read_ahead`, workers): batches
        read ahead do not count as received.
        """
        cursor, self.is_trained = self._cursor, True
        cursor.stepped = cursor.position
        cursor.stepped_extra = self.source.extra_state(cursor.epoch, cursor.position)

    def state_dict(self, *, stepped: bool = False) -> dict[str, Any]:
        """Return the position after the last received batch, as plain values.

        Save the state of rank 0: it is valid on all ranks. States of different ranks differ at most in the stream
        state in `extra`, which determines only how much of the stream a resume reads again.

        Any number of ranks can load the state, with any batch size, unless the user's batches are distributed whole
        (see `order_source`).

        Args:
            stepped: Whether to return the position at the last `mark_stepped` instead. A resume then repeats the
                batches that no optimizer has stepped on.
        """
        cursor = self._cursor
        epoch, position, repeats = cursor.epoch, cursor.position, cursor.repeats
        if cursor.is_finished:
            epoch, position = cursor.next_loop()
        if stepped and not cursor.is_finished:
            position, extra = cursor.stepped, cursor.stepped_extra
            repeats += cursor.position - cursor.stepped
        else:
            extra = self.source.extra_state(epoch, position)
        return {
            "format": STATE_FORMAT,
            "epoch": epoch,
            "position": position,
            "seed": self.source.seed,
            "identity": dict(self.source.identity()),
            "fingerprint": fingerprint_of(self.dataset),
            "extra": dict(extra),
            **({"repeats": repeats} if repeats else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a position: the next loop continues with the first sample that was not received.

        DataStateError if the state belongs to other data or another order, or its format is newer.
        """
        check_state(state, identity=self.source.identity(), fingerprint=fingerprint_of(self.dataset))
        self.source.load_extra_state(state["epoch"], state["extra"])
        self.source.seed = state["seed"]
        self.seed_source = "the loader state that was loaded"
        self.move_to(state["epoch"], state["position"])
        self._cursor.repeats = state.get("repeats", 0)

    def _end_loop(self) -> None:
        """End the running loop; its iterator raises an error if the program advances it again."""
        self._running = None
        if self._activity is not None:
            self._activity.pop(self)
        self.current = None

    def _start(self, epoch: int, position: int) -> None:
        if self.current is not None:
            self._end_loop()
        if self.source.states is not None:
            self.source.states.reset()
        extra, num_moves = self.source.extra_state(epoch, position), self._cursor.num_moves
        self._cursor = _Cursor(epoch, position, position, extra, num_moves=num_moves)

    def _go_back_to(self, cursor: _Cursor) -> None:
        """Continue a loop at its own position after another loop has begun; see `may_interleave`."""
        if not self.may_interleave or cursor.num_moves != self._cursor.num_moves:
            raise RuntimeError(
                "another loop over this ShardedLoader has begun, or set_epoch or load_state_dict was called, "
                "while this loop was running, but the loader has only one position: leave the loop first; to "
                "nest loops, shard a second DataLoader"
            )
        if self.current is not None:
            self._end_loop()
        self._cursor = self._running = cursor

    def _loop(self, num_skipped: int) -> Iterator[Batch]:
        if self._cursor.is_begun:
            self._start(*self._cursor.next_loop())
        cursor = self._running = self._cursor
        cursor.is_begun, cursor.repeats = True, 0
        source, activity, on_batch, copies = self.source, self._activity, self._on_batch, self._copies
        cursor.position += num_skipped * source.stride
        try:
            source.move_to(cursor.epoch, cursor.position)
            open_source = self._opener.opening(source, cursor.epoch, cursor.position)
            readings = open_source() if self._dispatch is None else self._dispatch.dispatched(open_source)
            arriving = readings if copies is None else copies.copied(readings)
            for plan, batch, origin in arriving if self.watch is None else self.watch(arriving):
                cursor.position += plan.advance
                if origin is not None:
                    source.note_received(plan, origin)
                self.current = plan if source.padded_size is None else plan.padded_to(source.padded_size)
                self.num_received += 1
                if activity is not None:
                    activity.push(self)
                if on_batch is not None:
                    on_batch()
                yield batch
                if self._running is not cursor:
                    self._go_back_to(cursor)
            cursor.is_finished = True
            if activity is not None:
                activity.finish(self)
        finally:
            if self._running is cursor:
                self._end_loop()
