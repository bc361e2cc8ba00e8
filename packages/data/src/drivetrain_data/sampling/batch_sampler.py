"""A user's batch sampler for torch's DataLoader: its batches are dealt out whole, or each split among the shards."""

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
from drivetrain_data.settings import Even
from drivetrain_data.shard import Shard
from drivetrain_data.state.sampler_snapshot import Drawn, EpochStart

_DRAWN_STEPS = 64  # steps of a batch sampler drawn at once


class WholeBatchSampler(StepSampler):
    """A user's batches, dealt out whole in turn, or each split among the shards.

    Args:
        batches: The user's batch sampler.
        seed: What generators are seeded from, with the epoch.
        size: The samples of the dataset, to check indices against; None if that is not known.
        shard: Whose batches are given.
        even: What becomes of the last step, if there are fewer batches than shards.
        split: Divide each batch among the shards, instead of giving each shard a whole one.
        reads_for_all: Give every shard's batches.
        agree: Told what was drawn first each time an epoch begins, to hold it against that of the other ranks.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[Any]],
        *,
        seed: int,
        size: int | None,
        shard: Shard,
        even: Even,
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
        self._checksums = (0, array("Q"))  # of an epoch: that of all batches up to each one, as far as drawn

    @property
    def name(self) -> str:
        """What a saved position names the order by."""
        return f"batches:{type(self.batches).__name__}"

    @property
    def source(self) -> str:
        """Where the order comes from, as one phrase for people."""
        return f"whole batches of {type(self.batches).__name__}, {self._start.how(self.seed)}"

    def identity(self) -> dict[str, Any]:
        """What the batches must agree on in a saved position, as far as it can be seen."""
        size = getattr(self.batches, "batch_size", None)
        return {"batch_size": size, "num_batches": self._start.fixed_length}

    def extra_state(self, epoch: int, position: int) -> dict[str, Any]:
        """What leads to an epoch, and a checksum of the batches up to a position."""
        begun, checksums = self._checksums
        if begun != epoch or not 0 < position <= len(checksums):
            return self._start.state(epoch)
        return self._start.state(epoch, Drawn(position, checksums[position - 1]))

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw an epoch as the run did that was saved in it."""
        self._start.resume(epoch, state)
        self._checksums = (epoch, array("Q"))

    def num_steps(self, epoch: int, position: int) -> int:
        """The steps of an epoch from a position on."""
        num_batches = self._start.length(self.seed, epoch) - position
        if self.split:
            return num_batches
        whole, rest = divmod(num_batches, self.shard.count)
        return whole + (rest > 0 and self.even != "drop")

    def steps(self, plans: deque[BatchPlan]) -> Iterator[list[Any]]:
        """Give batches of indices."""
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
        """Each shard's batch, and how many of its samples count."""
        count = self.shard.count
        if self.split:
            (batch,) = group
            bounds = [balanced(len(batch), count, shard) for shard in range(count)]
            held = [batch[begin:end] or batch[-1:] for begin, end in bounds]
            return held, [end - begin for begin, end in bounds]
        missing = count - len(group)
        repeated = [first[i % len(first)] for i in range(missing)]  # to pad with
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
        """The batches from the position on, if those before it are what they were in the run that was saved."""
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
        """The user's batches of the epoch, drawn in blocks so that generators are exchanged seldom."""
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
            except (
                GeneratorExit
            ):  # the loop is left, and its epoch over: the sampler comes to the epoch's end
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
