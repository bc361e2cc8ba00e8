"""Foreign loaders, which are not torch's: their batches are distributed whole, in turn."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import isgenerator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from drivetrain_data._nested import leading_size, leading_sizes
from drivetrain_data.randomness.generators import KeyedDraws, load_plain_states
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.settings import UnevenPolicy
from drivetrain_data.shard import Shard
from drivetrain_data.sources.base import Mark, Reading
from drivetrain_data.state.integrations import left_out_of_state
from drivetrain_data.state.sampler_snapshot import prepare_sampler
from drivetrain_data.state.stream_state import Snapshots, Stand

logger = logging.getLogger(__name__)


class ForeignSource:
    """A source that reads any iterable of batches, `shard.count` batches per step.

    Args:
        loader: An iterable of batches that starts anew with each loop.
        shard: The shard whose batches to yield.
        even: The treatment of a last step with fewer batches than shards.
        seed: The seed, with the epoch, of the generators that the loader holds and, while it reads, the global ones.
        reads_for_all: Whether to yield the batches of all shards.
    """

    def __init__(
        self, loader: Any, shard: Shard, even: UnevenPolicy, *, seed: int, reads_for_all: bool
    ) -> None:
        self._loader = loader
        self._shard = shard
        self._even: UnevenPolicy = even
        self.seed = seed
        self.reads_for_all = reads_for_all
        dataset = getattr(loader, "dataset", None)
        self._stream: Any = dataset if isinstance(dataset, IterableDataset) else None
        self._left_out = left_out_of_state(self._stream, getattr(loader, "num_workers", 0))
        self._snapshots = Snapshots(loader, trusted=self._left_out is None)
        self._received = 0  # the number of batches received in the epoch
        self._stand: Stand | None = None
        self._told = False  # whether a warning about batches of unknown size was logged

    @property
    def order_source(self) -> str:
        """The origin of the order, as a phrase for users."""
        name = type(self._loader).__name__
        if self._shard.count == 1:
            return f"the batches of {name} as they come"
        return f"the batches of {name}, dealt out in turn; it must yield the same on every rank that reads"

    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read an epoch from a position on, one step ahead, since only the loader knows when it ends."""
        prepare_sampler(self._loader, self.seed, epoch)
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)
        drawing = KeyedDraws(self.seed, epoch).active
        count = self._shard.count
        with drawing():
            batches = self._batches_from(position)
            first = group = list(islice(batches, count))
            snapshot = self._snapshots.take()  # now, because the next step is read before this one is yielded
        while group and not (len(group) < count and self._even == "drop"):
            with drawing():
                following = list(islice(batches, count))
                following_snapshot = self._snapshots.take()
            ends = not following or (len(following) < count and self._even == "drop")
            advance = len(group)
            if self._even == "pad":
                group += [first[i % len(first)] for i in range(count - advance)]
            plan = self._plan(group, is_last=ends, advance=advance)
            mark = Mark(0, snapshot)
            if self.reads_for_all:
                yield plan, group, mark
            else:
                yield plan, group[min(self._shard.index, len(group) - 1)], mark
            group, snapshot = following, following_snapshot

    def note_received(self, plan: BatchPlan, mark: Mark) -> None:
        """Count the received batches, and keep the snapshot of the loader."""
        self._received += plan.advance
        if mark.snapshot is not None:
            self._stand = Stand(self._received, mark.snapshot)

    def num_steps(self, _epoch: int, position: int) -> int:
        """Return the number of steps of an epoch from a position on.

        Raises:
            TypeError: The loader has no length.
        """
        whole, rest = divmod(max(0, len(self._loader) - position), self._shard.count)
        return whole + (rest > 0 and self._even != "drop")

    def position_after(self, _epoch: int, position: int, num_steps: int) -> int:
        """Return the position `num_steps` steps after `position`."""
        return position + num_steps * self._shard.count

    def identity(self) -> Mapping[str, Any]:
        """Return the values that must match those of a saved state."""
        return {"order": f"loader:{type(self._loader).__name__}"}

    def extra_state(self, _epoch: int, position: int) -> Mapping[str, Any]:
        """Return the loader's own state, if it has one; else the position suffices, if the loader repeats itself."""
        return {"stand": self._stand._asdict()} if position and self._stand is not None else {}

    def take_up(self, _epoch: int, state: Mapping[str, Any]) -> None:
        """Load the loader's own state."""
        self._stand = Stand(**state["stand"]) if "stand" in state else None

    def _batches_from(self, position: int) -> Iterator[Any]:
        self._received = position
        if not position:
            self._stand = None
            return iter(self._loader)
        stand = self._stand
        if (stand is None or stand.received < position) and (self.reads_for_all or self._shard.index == 0):
            logger.warning(
                "going on at batch %d of %s: it is read and dropped %s%s",
                position,
                type(self._loader).__name__,
                "up to there"
                if stand is None
                else f"from batch {stand.received} on, where its own state ends",
                "" if self._left_out is None else f", since its own state leaves out {self._left_out}",
            )
        if stand is None:
            return islice(iter(self._loader), position, None)
        self._loader.load_state_dict(stand.snapshot["reader"])
        batches = iter(self._loader)
        # A generator starts only at its first batch, and then repeats the draws of the epoch's start.
        if not isgenerator(batches):
            load_plain_states(stand.snapshot["generators"])
        return islice(batches, position - stand.received, None)

    def _plan(self, group: list[Any], *, is_last: bool, advance: int) -> BatchPlan:
        count = self._shard.count
        read = [leading_size(batch) for batch in group]
        held = [size for size in read if size is not None]
        known = len(held) == len(read)
        if known:
            held += held[-1:] * (count - len(held))
        elif count > 1 and not self._told:
            self._tell_unknown(group[read.index(None)])
        real = (held[:advance] if known else [1] * advance) + [0] * (count - advance)
        padded = self._even == "pad"
        plan = BatchPlan(
            real_counts=tuple(real),
            sizes=tuple(held) if known else None,
            even=(not known or len(set(held)) == 1) and (padded or 0 not in real),
            is_last=is_last,
            replayed=False,
            advance=advance,
            guessed=True,
        )
        return replace(plan, replayed=plan.replays(self._shard.index))

    def _tell_unknown(self, batch: Any) -> None:
        self._told = True
        sizes = ", ".join(map(str, sorted(leading_sizes(batch))))
        logger.warning(
            "a batch of %s does not say how many samples it holds (%s): every batch weighs the same, whatever its "
            "size, in a mean over ranks; to weigh samples, give a sum and their number: "
            "backward(loss_sum, count=...)",
            type(self._loader).__name__,
            f"its parts have sizes {sizes}" if sizes else "no part of it has a size",
        )
