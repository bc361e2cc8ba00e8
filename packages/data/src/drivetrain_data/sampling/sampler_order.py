"""Orders that a user's sampler draws: samples, all at an epoch's start, or batches, while they are read.

Each epoch begins from a known state, and every generator that the sampler may use is seeded from (seed, epoch), so
that a resume draws the epoch again. A checksum of the drawn samples reveals a sampler that draws from another source,
by comparing ranks, and a resume with its saved run.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from torch.utils.data import WeightedRandomSampler

from drivetrain_data.errors import DataStateError
from drivetrain_data.randomness.generators import KeyedDraws
from drivetrain_data.randomness.permutation import Positions
from drivetrain_data.sampling.indices import as_indices, checksum_of, until_its_end
from drivetrain_data.sampling.order import ComputedOrder, Order
from drivetrain_data.sampling.rank_agreement import RankAgreement
from drivetrain_data.state.sampler_parts import (
    SamplerCopy,
    StatefulReader,
    copy_of,
    length_of,
    prepare_sampler,
)

_BATCHES_AT_ONCE = 64  # so that generators are swapped seldom


class Drawn(NamedTuple):
    """The number and the checksum of the samples drawn in an epoch, which a resume compares."""

    length: int
    checksum: int


class SamplerOrder(Order):
    """A base class of orders that a user's sampler draws.

    A sampler with a `state_dict` gets its state back. A sampler without one that changes when it is read is
    read again from its first epoch on. For any other, the seeds of its generators are the full state. The
    agreement checks that all ranks drew the same; None without other ranks.
    """

    kind: str  # begins the name in a saved position

    def __init__(
        self, sampler: Any, *, seed: int, size: int | None, agreement: RankAgreement | None = None
    ) -> None:
        super().__init__(f"{self.kind}:{type(sampler).__name__}", seed=seed)
        self._sampler = sampler
        self._size = size
        self._agreement = agreement
        self._is_stateful = isinstance(sampler, StatefulReader)
        self._prepared: tuple[int, int] | None = None  # the seed and epoch that the sampler is prepared for
        self._first: SamplerCopy | None = None  # the sampler before its first epoch
        self._is_copied = not self._is_stateful and type(sampler) is not WeightedRandomSampler
        self._content: bytes | None = None  # that of the sampler before the running epoch
        self._changes = False  # whether reading changes the sampler
        self._epochs_read: list[list[int]] = []  # as runs [start, stop)
        # The epoch begun last, or loaded -> the state from which the sampler begins it.
        self._begun: dict[int, dict[str, Any]] = {}
        self._loaded: dict[int, dict[str, Any]] = {}

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        how = "from its saved state, " if self._is_stateful else ""
        if self._changes:
            how = "after all epochs before it, since reading changes it, "
        return (
            f"{type(self._sampler).__name__}, drawn on every rank {how}with its own and the global generators seeded "
            f"from (seed {self.seed}, epoch)"
        )

    def length(self, epoch: int) -> int:
        """Return the sampler's length in an epoch."""
        if hasattr(self._sampler, "set_epoch"):
            self._prepare(epoch)
        return len(self._sampler)

    def load_extra_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw the epoch again as the saved run drew it."""
        self._begun, self._loaded = {}, {epoch: dict(state)}
        self._prepared = None

    def _fixed_length(self) -> int | None:
        """Return the sampler's length; None if it has no length, or `set_epoch` may change it."""
        return None if hasattr(self._sampler, "set_epoch") else length_of(self._sampler)

    def _begin_epoch(self, epoch: int) -> None:
        """Prepare the sampler for the iteration of an epoch."""
        self._finish_epoch()
        loaded = self._loaded.get(epoch, {})
        if "sampler" in loaded and self._is_stateful:
            self._sampler.load_state_dict(deepcopy(loaded["sampler"]))
        # A state from the first epoch has no "read", because only finishing an epoch shows that reading changes it.
        if epoch in self._loaded and ("read" in loaded or self._changes):
            self._read_again(loaded.get("read", []))
        state = self._current_state()
        self._begin(epoch)
        self._begun = {epoch: state}

    def _finish_epoch(self) -> None:
        """Record whether reading has changed the sampler."""
        if self._content is None:
            return
        now = copy_of(self._sampler)
        self._changes = now is not None and now.content != self._content
        self._content = None
        if self._changes and self._begun:
            *before, (start, stop) = self._epochs_read
            before += [[start, stop - 1]] if stop - 1 > start else []
            self._begun = {epoch: {**state, "read": before} for epoch, state in self._begun.items()}

    def _state(self, epoch: int, drawn: Drawn | None = None) -> dict[str, Any]:
        """Return the state to save in an epoch, with a summary of the drawn samples if the epoch has begun."""
        known = {**self._loaded, **self._begun}
        state = known[epoch] if epoch in known else self._current_state()
        return state if drawn is None else {**state, "drawn": drawn._asdict()}

    def _expected(self, epoch: int) -> Drawn | None:
        """Return the saved summary that an epoch's draw must match; None if no sample had been received."""
        saved = self._loaded.get(epoch, {}).get("drawn")
        return None if saved is None else Drawn(**saved)

    def _check(self, epoch: int, drawn: Drawn | None) -> None:
        """Check the samples drawn in an epoch against those of the saved run."""
        if self._expected(epoch) not in (None, drawn):
            name = type(self._sampler).__name__
            raise DataStateError(
                f"{name} drew another order of epoch {epoch} than in the run that was saved, so that samples would "
                "be lost or read twice; build the sampler as before, over the same data. If that does not help, its "
                "order depends on more than its own and the global generators: give it state_dict and "
                "load_state_dict, or start the epoch again"
            )

    def _check_agreement(self, checksum: int) -> None:
        if self._agreement is not None:
            self._agreement.check_drawn(type(self._sampler).__name__, checksum)

    def _current_state(self) -> dict[str, Any]:
        state = {"sampler": deepcopy(self._sampler.state_dict())} if self._is_stateful else {}
        return {**state, "read": [list(run) for run in self._epochs_read]} if self._changes else state

    def _prepare(self, epoch: int) -> None:
        if self._prepared == (self.seed, epoch):
            return
        self._finish_epoch()
        if self._first is None and self._is_copied:
            self._first = copy_of(self._sampler)
            self._is_copied = self._first is not None
        prepare_sampler(self._sampler, self.seed, epoch)
        self._prepared = (self.seed, epoch)

    def _begin(self, epoch: int) -> None:
        self._prepared = None
        self._prepare(epoch)
        before = copy_of(self._sampler) if self._is_copied and not self._changes else None
        self._content = None if before is None else before.content
        if self._epochs_read and self._epochs_read[-1][1] == epoch:
            self._epochs_read[-1][1] += 1
        else:
            self._epochs_read.append([epoch, epoch + 1])

    def _read_again(self, runs: list[list[int]]) -> None:
        """Read earlier epochs again, beginning with the sampler's first state."""
        if self._first is not None:
            self._first.restore()
        self._epochs_read = []
        self._changes = True
        for start, stop in runs:
            for epoch in range(start, stop):
                self._begin(epoch)
                with KeyedDraws(self.seed, epoch).active():
                    items = until_its_end(self._sampler, f"epoch {epoch}, read before the saved one,")
                    deque(items, maxlen=0)


class _Epoch(NamedTuple):
    """An epoch whose samples have all been drawn."""

    seed: int
    number: int
    samples: Positions | list[Any]
    summary: Drawn
    state: dict[str, Any]  # built once because extra_state is called at every step


class DrawnOrder(SamplerOrder):
    """An order of samples drawn by a sampler with a length. The start of an epoch draws the whole epoch."""

    kind = "drawn"

    _drawn: _Epoch | None = None

    def length(self, epoch: int) -> int:
        """Return the number of positions drawn for an epoch or, before the draw, the sampler's length."""
        if self._drawn is not None and self._drawn[:2] == (self.seed, epoch):
            return len(self._drawn.samples)
        return super().length(epoch)

    def identity(self) -> dict[str, Any]:
        """Return the visible values that the sampler was built from; the state holds the drawn samples."""
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
        """Return the sampler's state before an epoch and, in a begun epoch, a checksum of the drawn samples."""
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
        """Return the visible values that must match those of a saved position."""
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
        """Return the batches from a position on, after checking the earlier batches against the saved run."""
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
        """Yield the user's batches of an epoch, and append the checksum of all batches so far for each batch."""
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
                # The loop was left, which ends its epoch: bring the sampler to the epoch's end, if later epochs
                # depend on it and its length is known.
                self._finish_epoch()
                length = length_of(self._sampler)
                if (self._is_stateful or self._changes) and length is not None:
                    with draws.active():
                        # One item more than the rest, so that the sampler's code after its last yield runs.
                        deque(islice(drawn, max(0, length - len(checksums)) + 1), maxlen=0)
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
