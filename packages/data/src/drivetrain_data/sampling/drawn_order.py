"""The order that a user's sampler draws: of samples, drawn whole at an epoch's start, or of batches, drawn as read.

Every generator that the sampler may use is seeded from (seed, epoch), so that a resume draws the epoch again. A
checksum of what was drawn shows ranks and resumes that a sampler draws from something else.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from torch.utils.data import WeightedRandomSampler

from drivetrain_data.randomness.generators import KeyedDraws
from drivetrain_data.randomness.permutation import Positions
from drivetrain_data.sampling.indices import as_indices, checksum_of, until_its_end
from drivetrain_data.sampling.order import ComputedOrder
from drivetrain_data.sampling.sampler_order import Drawn, SamplerOrder

_BATCHES_AT_ONCE = 64  # so that generators are swapped seldom


class _Epoch(NamedTuple):
    """An epoch that was drawn whole."""

    seed: int
    number: int
    samples: Positions | list[Any]
    summary: Drawn
    state: dict[str, Any]  # built once because extra_state is called at every step


class DrawnOrder(SamplerOrder):
    """An order of samples drawn by a sampler with a length. A whole epoch is drawn as it starts."""

    kind = "drawn"

    _drawn: _Epoch | None = None

    def length(self, epoch: int) -> int:
        """Return the number of positions in an epoch: those drawn or, before the draw, the sampler's length."""
        if self._drawn is not None and self._drawn[:2] == (self.seed, epoch):
            return len(self._drawn.samples)
        return super().length(epoch)

    def identity(self) -> dict[str, Any]:
        """Return what the sampler was built from, as far as it is visible; the state holds what it drew."""
        found: dict[str, Any] = {"num_positions": self._fixed_length()}
        if type(self._sampler) is WeightedRandomSampler:
            found["built_from"] = checksum_of(self._sampler.weights.numpy())
        return found

    def begin(self, epoch: int) -> None:
        """Draw an epoch, and check that all ranks drew the same. Called on all ranks."""
        self._check_agreement(self._draw(epoch).summary.checksum)

    def take(self, epoch: int, positions: Positions) -> list[Any]:
        """Return the indices of the samples at the given positions."""
        samples = self._draw(epoch).samples
        if isinstance(samples, np.ndarray):
            return samples[positions].tolist()
        return [samples[position] for position in positions.tolist()]

    def extra_state(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the sampler's state before an epoch and, once it has begun, a checksum of what was drawn."""
        if position and self._drawn is not None and self._drawn.number == epoch:
            return self._drawn.state
        return self._state(epoch)

    def load_extra_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw the epoch again as the saved run drew it."""
        super().load_extra_state(epoch, state)
        self._drawn = None

    def _draw(self, epoch: int) -> _Epoch:
        if self._drawn is None or self._drawn[:2] != (self.seed, epoch):
            self._begin_epoch(epoch)
            with KeyedDraws(self.seed, epoch).active():
                items = list(until_its_end(self._sampler, f"epoch {epoch}"))
            self._finish_epoch()
            drawn = as_indices(items, self._size, self._sampler)
            summary = Drawn(len(drawn), checksum_of(drawn))
            self._check(epoch, summary)
            state = self._state(epoch, summary)
            self._drawn = _Epoch(self.seed, epoch, drawn, summary, state)
        return self._drawn


# An order of samples, which can be read at any position.
IndexOrder: TypeAlias = ComputedOrder | DrawnOrder


class DrawnBatches(SamplerOrder):
    """The batches of a user's batch sampler, drawn as they are read."""

    kind = "batches"
    # The epoch begun last, and for each batch drawn the checksum of all up to it.
    _checksums: "tuple[int, array[int]]" = (0, array("Q"))

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"whole batches of {super().source}"

    def identity(self) -> dict[str, Any]:
        """Return the values that must match those of a saved position, as far as they are visible."""
        size = getattr(self._sampler, "batch_size", None)
        return {"batch_size": size, "num_batches": self._fixed_length()}

    def extra_state(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the sampler's state before an epoch, and a checksum of the batches up to a position."""
        begun, checksums = self._checksums
        if begun != epoch or not 0 < position <= len(checksums):
            return self._state(epoch)
        return self._state(epoch, Drawn(position, checksums[position - 1]))

    def load_extra_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw the epoch again as the saved run drew it."""
        super().load_extra_state(epoch, state)
        self._checksums = (epoch, array("Q"))

    def read(self, epoch: int, position: int) -> Iterator[list[Any]]:
        """Return the batches from a position on, after checking those before it against the saved run."""
        checksums = array("Q")
        batches = self._draw(epoch, checksums)
        deque(islice(batches, position), maxlen=0)
        expected = self._expected(epoch)
        if expected is not None and expected.length <= position:
            known = expected.length <= len(checksums)
            drawn = Drawn(expected.length, checksums[expected.length - 1]) if known else None
            self._check(epoch, drawn)
        self._checksums = (epoch, checksums)
        return batches

    def _draw(self, epoch: int, checksums: "array[int]") -> Iterator[list[Any]]:
        """Yield the user's batches of an epoch, and append the checksum of all up to each."""
        self._begin_epoch(epoch)
        draws = KeyedDraws(self.seed, epoch)
        checksum, is_first = 0, True
        with draws.active():
            drawn = iter(self._sampler)
        while True:
            with draws.active():
                listed = [self._listed(batch) for batch in islice(drawn, _BATCHES_AT_ONCE)]
            block = [as_indices(batch, self._size, self._sampler) for batch in listed]
            for batch in block:
                checksum = checksum_of(batch, checksum)
                checksums.append(checksum)
            is_last = len(block) < _BATCHES_AT_ONCE
            if is_first or is_last:
                self._check_agreement(checksum)
            is_first = False
            try:
                for batch in block:
                    yield batch.tolist() if isinstance(batch, np.ndarray) else batch
            except GeneratorExit:
                # The loop was left, which ends its epoch: bring the sampler to the epoch's end.
                self._exhaust(drawn, draws, num_drawn=len(checksums))
                raise
            if is_last:
                self._finish_epoch()
                return

    def _listed(self, batch: Any) -> list[Any]:
        if isinstance(batch, Iterable) and not isinstance(batch, str):
            return list(cast("Iterable[Any]", batch))
        raise ValueError(
            f"a batch sampler gives lists of indices, and {type(self._sampler).__name__} gave {batch!r}; a sampler "
            "of single indices goes to DataLoader(sampler=..., batch_size=...)"
        )
