"""A sampler that distributes the batches of a user's batch sampler: whole, or each split among the shards."""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import numpy as np

from drivetrain_data.collective_errors import Agree
from drivetrain_data.randomness.generators import KeyedDraws
from drivetrain_data.sampling.indices import as_indices, checksum_of
from drivetrain_data.sampling.partition import balanced
from drivetrain_data.sampling.samplers import StepSampler
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.settings import UnevenPolicy
from drivetrain_data.shard import Shard
from drivetrain_data.state.sampler_snapshot import Drawn, EpochStart

_DRAWN_STEPS = 64  # batches drawn at once


class WholeBatchSampler(StepSampler):
    """A sampler of a user's batches, distributed whole in turn, or each split among the shards.

    Args:
        batches: The user's batch sampler.
        seed: The seed, with the epoch, of the generators.
        size: The number of samples in the dataset, to check indices against; None if unknown.
        shard: The shard whose batches to yield.
        even: The treatment of a last step with fewer batches than shards.
        split: Whether to split each batch among the shards, instead of giving each shard a whole one.
        reads_for_all: Whether to yield the batches of all shards.
        agree: A callback that checks that all ranks drew the same, at the start and the end of an epoch.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[Any]],
        *,
        seed: int,
        size: int | None,
        shard: Shard,
        even: UnevenPolicy,
        split: bool = False,
        reads_for_all: bool = False,
        agree: Agree | None = None,
    ) -> None:
        super().__init__(shard, even, reads_for_all=reads_for_all)
        self.batches = batches
        self.seed = seed
        self.size = size
        self.split = split
        self._start = EpochStart(batches)
        self._agree = agree
        self._checksums = (0, array("Q"))  # an epoch, and for each batch drawn the checksum of all up to it

    @property
    def name(self) -> str:
        """The name of the order in a saved position."""
        return f"batches:{type(self.batches).__name__}"

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"whole batches of {type(self.batches).__name__}, {self._start.how(self.seed)}"

    def identity(self) -> dict[str, Any]:
        """Return the values that must match those of a saved position, as far as they are visible."""
        size = getattr(self.batches, "batch_size", None)
        return {"batch_size": size, "num_batches": self._start.fixed_length}

    def extra_state(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the sampler's state before an epoch, and a checksum of the batches up to a position."""
        begun, checksums = self._checksums
        if begun != epoch or not 0 < position <= len(checksums):
            return self._start.state(epoch)
        return self._start.state(epoch, Drawn(position, checksums[position - 1]))

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw the epoch again as the saved run drew it."""
        self._start.resume(epoch, state)
        self._checksums = (epoch, array("Q"))

    def num_steps(self, epoch: int, position: int) -> int:
        """Return the number of steps of an epoch from a position on."""
        num_batches = self._start.length(self.seed, epoch) - position
        if self.split:
            return num_batches
        whole, rest = divmod(num_batches, self.shard.count)
        return whole + (rest > 0 and self.even != "drop")

    def steps(self, plans: deque[BatchPlan]) -> Iterator[list[Any]]:
        """Yield batches of indices."""
        taken_a_step = 1 if self.split else self.shard.count
        batches = self._rest()
        first = group = list(islice(batches, taken_a_step))
        while group:
            following = list(islice(batches, taken_a_step))
            if len(following) < taken_a_step and self.even == "drop":
                following = []
            if len(group) < taken_a_step and self.even == "drop":
                return
            held, real = self._deal(group, first)
            plans.append(self._plan(held, real, is_last=not following, advance=len(group)))
            if self.reads_for_all:
                yield from held[: len(held) if self.even == "pad" else sum(count > 0 for count in real)]
            else:
                yield held[self.shard.index]
            group = following

    def _deal(self, group: list[list[Any]], first: list[list[Any]]) -> tuple[list[list[Any]], list[int]]:
        """Return each shard's batch, and the number of its real samples."""
        count = self.shard.count
        if self.split:
            (batch,) = group
            bounds = [balanced(len(batch), count, shard) for shard in range(count)]
            held = [batch[begin:end] or batch[-1:] for begin, end in bounds]
            return held, [end - begin for begin, end in bounds]
        missing = count - len(group)
        repeated = [first[i % len(first)] for i in range(missing)]  # the padding
        extra = repeated if self.even == "pad" else [group[-1]] * missing
        return group + extra, [len(batch) for batch in group] + [0] * missing

    def _plan(self, held: list[list[Any]], real: list[int], *, is_last: bool, advance: int) -> BatchPlan:
        sizes = tuple(map(len, held))
        padded = self.even == "pad" and not self.split
        plan = BatchPlan(
            real_counts=tuple(real),
            sizes=sizes,
            even=len(set(sizes)) == 1 and (padded or 0 not in real),
            is_last=is_last,
            replayed=False,
            advance=advance,
        )
        return replace(plan, replayed=plan.replays(self.shard.index))

    def _rest(self) -> Iterator[list[Any]]:
        """Return the batches from the position on, after checking those before it against the saved run."""
        checksums = array("Q")
        batches = self._draw(checksums)
        deque(islice(batches, self.position), maxlen=0)
        expected = self._start.expected(self.epoch)
        if expected is not None and expected.length <= self.position:
            known = expected.length <= len(checksums)
            drawn = Drawn(expected.length, checksums[expected.length - 1]) if known else None
            self._start.check(self.epoch, drawn)
        self._checksums = (self.epoch, checksums)
        return batches

    def _draw(self, checksums: "array[int]") -> Iterator[list[Any]]:
        """Yield the user's batches of the epoch, drawn in blocks so that generators are swapped seldom."""
        self._start.begin(self.seed, self.epoch)
        draws = KeyedDraws(self.seed, self.epoch)
        checksum, is_first = 0, True
        with draws.active():
            drawn = iter(self.batches)
        while True:
            with draws.active():
                block = [_listed(batch, self.batches) for batch in islice(drawn, _DRAWN_STEPS)]
            held = [as_indices(batch, self.size, self.batches) for batch in block]
            for batch in held:
                checksum = checksum_of(batch, checksum)
                checksums.append(checksum)
            is_last = len(block) < _DRAWN_STEPS
            if self._agree is not None and (is_first or is_last):
                self._agree(type(self.batches).__name__, checksum)
            is_first = False
            try:
                for batch in held:
                    yield batch.tolist() if isinstance(batch, np.ndarray) else batch
            except GeneratorExit:
                # The loop was left, which ends its epoch: bring the sampler to the epoch's end.
                self._start.exhaust(drawn, draws, num_drawn=len(checksums))
                raise
            if is_last:
                self._start.finish()
                return


def _listed(batch: Any, batches: object) -> list[Any]:
    if isinstance(batch, Iterable) and not isinstance(batch, str):
        return list(cast("Iterable[Any]", batch))
    raise ValueError(
        f"a batch sampler gives lists of indices, and {type(batches).__name__} gave {batch!r}; a sampler of single "
        "indices goes to DataLoader(sampler=..., batch_size=...)"
    )
