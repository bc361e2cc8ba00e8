"""The order that a user's sampler draws."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import WeightedRandomSampler

from drivetrain_data.randomness.generators import KeyedDraws
from drivetrain_data.randomness.permutation import Positions
from drivetrain_data.sampling.indices import as_indices, checksum_of
from drivetrain_data.state.sampler_snapshot import Drawn, EpochStart


class DrawnOrder:
    """An order drawn by a sampler, with every generator that it may use seeded from (seed, epoch).

    A whole epoch is drawn at its start, without reading data; a resume draws it again.

    Args:
        sampler: The user's sampler, with a length.
        seed: The seed from which, with the epoch, every order is derived.
        size: The number of samples in the dataset, to check indices against; None if unknown.
    """

    def __init__(self, sampler: Any, *, seed: int, size: int | None) -> None:
        self.sampler = sampler
        self.seed = seed
        self.size = size
        self._drawn: tuple[int, int, Any] | None = None
        self._summary = Drawn(0, 0)
        # The state of the drawn epoch, built once because extra_state is called at every step.
        self._state: dict[str, Any] = {}
        self._start = EpochStart(sampler)

    @property
    def name(self) -> str:
        """The name of the order in a saved position."""
        return f"drawn:{type(self.sampler).__name__}"

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"{type(self.sampler).__name__}, {self._start.how(self.seed)}"

    def length(self, epoch: int) -> int:
        """Return the number of positions in an epoch: those drawn or, before the draw, the sampler's length."""
        if self._drawn is not None and self._drawn[:2] == (self.seed, epoch):
            return len(self._drawn[2])
        return self._start.length(self.seed, epoch)

    def identity(self) -> dict[str, Any]:
        """Return what the sampler was built from, as far as it is visible; the state holds what it drew."""
        found: dict[str, Any] = {"num_positions": self._start.fixed_length}
        if type(self.sampler) is WeightedRandomSampler:
            found["built_from"] = checksum_of(self.sampler.weights.numpy())
        return found

    def take(self, epoch: int, positions: Positions) -> list[Any]:
        """Return the indices of the samples at the given positions."""
        drawn = self._draw(epoch)
        return (
            drawn[positions].tolist()
            if isinstance(drawn, np.ndarray)
            else [drawn[p] for p in positions.tolist()]
        )

    def checksum(self, epoch: int) -> int:
        """Return the checksum of the samples drawn in an epoch."""
        self._draw(epoch)
        return self._summary.checksum

    def extra_state(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the sampler's state before an epoch and, once it has begun, a checksum of what was drawn."""
        if position and self._drawn is not None and self._drawn[1] == epoch:
            return self._state
        return self._start.state(epoch)

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw the epoch again as the saved run drew it."""
        self._start.resume(epoch, state)
        self._drawn = None

    def _draw(self, epoch: int) -> Any:
        if self._drawn is None or self._drawn[:2] != (self.seed, epoch):
            self._start.begin(self.seed, epoch)
            with KeyedDraws(self.seed, epoch).active():
                items = list(self.sampler)
            self._start.finish()
            drawn = as_indices(items, self.size, self.sampler)
            self._summary = Drawn(len(drawn), checksum_of(drawn))
            self._start.check(epoch, self._summary)
            self._state = self._start.state(epoch, self._summary)
            self._drawn = (self.seed, epoch, drawn)
        return self._drawn[2]
