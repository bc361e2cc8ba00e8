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
    """What a sampler draws, with every generator that it can be using seeded from (seed, epoch).

    An epoch is drawn whole at its start, which touches no data; a resume draws it again.

    Args:
        sampler: The user's, with a length.
        seed: The seed of all epochs.
        size: The samples of the dataset, to check indices against; None if that is not known.
    """

    def __init__(self, sampler: Any, *, seed: int, size: int | None) -> None:
        self.sampler = sampler
        self.seed = seed
        self.size = size
        self._drawn: tuple[int, int, Any] | None = None
        self._summary = Drawn(0, 0)
        # Of the epoch drawn; built once, since it is asked for at every step.
        self._state: dict[str, Any] = {}
        self._start = EpochStart(sampler)

    @property
    def name(self) -> str:
        """What a saved position names it by."""
        return f"drawn:{type(self.sampler).__name__}"

    @property
    def source(self) -> str:
        """Where the order comes from."""
        return f"{type(self.sampler).__name__}, {self._start.how(self.seed)}"

    def length(self, epoch: int) -> int:
        """The positions in an epoch: those drawn, or before that what the sampler says."""
        if self._drawn is not None and self._drawn[:2] == (self.seed, epoch):
            return len(self._drawn[2])
        return self._start.length(self.seed, epoch)

    def identity(self) -> dict[str, Any]:
        """What the sampler was built from, as far as it can be seen; what it drew is in the state."""
        found: dict[str, Any] = {"num_positions": self._start.fixed_length}
        if type(self.sampler) is WeightedRandomSampler:
            found["built_from"] = checksum_of(self.sampler.weights.numpy())
        return found

    def take(self, epoch: int, positions: Positions) -> list[Any]:
        """The samples at positions."""
        drawn = self._draw(epoch)
        return (
            drawn[positions].tolist()
            if isinstance(drawn, np.ndarray)
            else [drawn[p] for p in positions.tolist()]
        )

    def checksum(self, epoch: int) -> int:
        """Of what is drawn in an epoch."""
        self._draw(epoch)
        return self._summary.checksum

    def extra_state(self, epoch: int, position: int) -> dict[str, Any]:
        """What leads to an epoch, and if it is begun a checksum of what was drawn."""
        if position and self._drawn is not None and self._drawn[1] == epoch:
            return self._state
        return self._start.state(epoch)

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw an epoch as the run did that was saved in it."""
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
