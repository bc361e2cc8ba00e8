"""The order that a user's sampler draws: of samples, drawn whole at an epoch's start, or of batches, drawn as read.

Every generator that the sampler may use is seeded from (seed, epoch), so that a resume draws the epoch again. A
checksum of what was drawn shows ranks and resumes that a sampler draws from something else.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

import numpy as np
from torch.utils.data import WeightedRandomSampler

from drivetrain_data.collective_errors import Agree
from drivetrain_data.randomness.generators import KeyedDraws
from drivetrain_data.randomness.permutation import Positions
from drivetrain_data.sampling.indices import as_indices, checksum_of
from drivetrain_data.sampling.order import Order, SampleOrder
from drivetrain_data.state.sampler_snapshot import Drawn, RestorableSampler

_BATCHES_AT_ONCE = 64  # so that generators are swapped seldom


class _DrawnByUser(Order):
    """A base class of orders that a user's sampler draws.

    Args:
        kind: The kind of order, which begins its name.
        sampler: The user's sampler or batch sampler.
        seed: The seed from which, with the epoch, every order is derived.
        size: The number of samples in the dataset, to check indices against; None if unknown.
        agree: A callback that checks that all ranks drew the same.
    """

    def __init__(
        self, kind: str, sampler: Any, *, seed: int, size: int | None, agree: Agree | None = None
    ) -> None:
        super().__init__(f"{kind}:{type(sampler).__name__}", seed=seed)
        self._restorable = RestorableSampler(sampler)
        self._sampler = sampler
        self._size = size
        self._agree = agree

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"{type(self._sampler).__name__}, {self._restorable.how(self.seed)}"

    def length(self, epoch: int) -> int:
        """Return the sampler's length in an epoch."""
        return self._restorable.length(self.seed, epoch)

    def load_extra_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw the epoch again as the saved run drew it."""
        self._restorable.load_state(epoch, state)

    def _check_agreement(self, checksum: int) -> None:
        if self._agree is not None:
            self._agree(type(self._sampler).__name__, checksum)


class DrawnOrder(_DrawnByUser, SampleOrder):
    """An order of samples drawn by a sampler. A whole epoch is drawn at its start, without reading data.

    Args:
        sampler: The user's sampler, with a length.
        seed: The seed from which, with the epoch, every order is derived.
        size: The number of samples in the dataset, to check indices against; None if unknown.
        agree: A callback that checks, as an epoch starts, that all ranks drew the same.
    """

    def __init__(self, sampler: Any, *, seed: int, size: int | None, agree: Agree | None = None) -> None:
        super().__init__("drawn", sampler, seed=seed, size=size, agree=agree)
        self._drawn: tuple[int, int, Positions | list[Any]] | None = (
            None  # the seed, the epoch and the samples
        )
        # The state of the drawn epoch, built once because extra_state is called at every step.
        self._state: dict[str, Any] = {}

    def length(self, epoch: int) -> int:
        """Return the number of positions in an epoch: those drawn or, before the draw, the sampler's length."""
        if self._drawn is not None and self._drawn[:2] == (self.seed, epoch):
            return len(self._drawn[2])
        return super().length(epoch)

    def identity(self) -> dict[str, Any]:
        """Return what the sampler was built from, as far as it is visible; the state holds what it drew."""
        found: dict[str, Any] = {"num_positions": self._restorable.fixed_length}
        if type(self._sampler) is WeightedRandomSampler:
            found["built_from"] = checksum_of(self._sampler.weights.numpy())
        return found

    def begin(self, epoch: int) -> None:
        """Draw an epoch, and check that all ranks drew the same. Called on all ranks."""
        self._draw(epoch)
        self._check_agreement(self._state["drawn"]["checksum"])

    def take(self, epoch: int, positions: Positions) -> list[Any]:
        """Return the indices of the samples at the given positions."""
        drawn = self._draw(epoch)
        if isinstance(drawn, np.ndarray):
            return drawn[positions].tolist()
        return [drawn[position] for position in positions.tolist()]

    def extra_state(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the sampler's state before an epoch and, once it has begun, a checksum of what was drawn."""
        if position and self._drawn is not None and self._drawn[1] == epoch:
            return self._state
        return self._restorable.state(epoch)

    def load_extra_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw the epoch again as the saved run drew it."""
        super().load_extra_state(epoch, state)
        self._drawn = None

    def _draw(self, epoch: int) -> Positions | list[Any]:
        if self._drawn is None or self._drawn[:2] != (self.seed, epoch):
            self._restorable.begin(self.seed, epoch)
            with KeyedDraws(self.seed, epoch).active():
                items = list(self._sampler)
            self._restorable.finish()
            drawn = as_indices(items, self._size, self._sampler)
            summary = Drawn(len(drawn), checksum_of(drawn))
            self._restorable.check(epoch, summary)
            self._state = self._restorable.state(epoch, summary)
            self._drawn = (self.seed, epoch, drawn)
        return self._drawn[2]


class DrawnBatches(_DrawnByUser):
    """The batches of a user's batch sampler, drawn as they are read.

    Args:
        sampler: The user's batch sampler.
        seed: The seed from which, with the epoch, every order is derived.
        size: The number of samples in the dataset, to check indices against; None if unknown.
        agree: A callback that checks, at the start and the end of an epoch, that all ranks drew the same.
    """

    def __init__(self, sampler: Any, *, seed: int, size: int | None, agree: Agree | None) -> None:
        super().__init__("batches", sampler, seed=seed, size=size, agree=agree)
        self._checksums = (0, array("Q"))  # an epoch, and for each batch drawn the checksum of all up to it

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"whole batches of {super().source}"

    def identity(self) -> dict[str, Any]:
        """Return the values that must match those of a saved position, as far as they are visible."""
        size = getattr(self._sampler, "batch_size", None)
        return {"batch_size": size, "num_batches": self._restorable.fixed_length}

    def extra_state(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the sampler's state before an epoch, and a checksum of the batches up to a position."""
        begun, checksums = self._checksums
        if begun != epoch or not 0 < position <= len(checksums):
            return self._restorable.state(epoch)
        return self._restorable.state(epoch, Drawn(position, checksums[position - 1]))

    def load_extra_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw the epoch again as the saved run drew it."""
        super().load_extra_state(epoch, state)
        self._checksums = (epoch, array("Q"))

    def read(self, epoch: int, position: int) -> Iterator[list[Any]]:
        """Return the batches from a position on, after checking those before it against the saved run."""
        checksums = array("Q")
        batches = self._draw(epoch, checksums)
        deque(islice(batches, position), maxlen=0)
        expected = self._restorable.expected(epoch)
        if expected is not None and expected.length <= position:
            known = expected.length <= len(checksums)
            drawn = Drawn(expected.length, checksums[expected.length - 1]) if known else None
            self._restorable.check(epoch, drawn)
        self._checksums = (epoch, checksums)
        return batches

    def _draw(self, epoch: int, checksums: "array[int]") -> Iterator[list[Any]]:
        """Yield the user's batches of an epoch, and append the checksum of all up to each."""
        self._restorable.begin(self.seed, epoch)
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
                self._restorable.exhaust(drawn, draws, num_drawn=len(checksums))
                raise
            if is_last:
                self._restorable.finish()
                return

    def _listed(self, batch: Any) -> list[Any]:
        if isinstance(batch, Iterable) and not isinstance(batch, str):
            return list(cast("Iterable[Any]", batch))
        raise ValueError(
            f"a batch sampler gives lists of indices, and {type(self._sampler).__name__} gave {batch!r}; a sampler "
            "of single indices goes to DataLoader(sampler=..., batch_size=...)"
        )
