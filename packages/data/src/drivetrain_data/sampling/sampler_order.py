"""The epochs of a user's sampler, each begun from a known state so that a resume can begin it again."""

from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import WeightedRandomSampler

from drivetrain_data.errors import DataStateError
from drivetrain_data.randomness.generators import KeyedDraws
from drivetrain_data.sampling.indices import until_its_end
from drivetrain_data.sampling.order import Order
from drivetrain_data.sampling.rank_agreement import Agree
from drivetrain_data.state.sampler_parts import SamplerCopy, copy_of, length_of, prepare_sampler
from drivetrain_data.state.stateful import StatefulReader


class Drawn(NamedTuple):
    """The number and the checksum of the samples drawn in an epoch, which a resume compares with what it draws."""

    length: int
    checksum: int


class _Snapshot(NamedTuple):
    """The state from which a sampler begins an epoch."""

    epoch: int
    state: dict[str, Any]


class SamplerOrder(Order):
    """A base class of orders that a user's sampler draws.

    A sampler with a `state_dict` gets its state back. A sampler without one whose attributes change when it is read
    is read again from its first epoch on. For any other, the seeds of its generators are the whole state. `agree`
    checks that all ranks drew the same; None if only one rank draws.
    """

    kind: str  # begins the name in a saved position

    def __init__(self, sampler: Any, *, seed: int, size: int | None, agree: Agree | None = None) -> None:
        super().__init__(f"{self.kind}:{type(sampler).__name__}", seed=seed)
        self._sampler = sampler
        self._size = size
        self._agree = agree
        self._is_stateful = isinstance(sampler, StatefulReader)
        self._prepared: tuple[int, int] | None = None  # the seed and epoch that the sampler is prepared for
        self._first: SamplerCopy | None = None  # the sampler before its first epoch
        self._is_copied = not self._is_stateful and type(sampler) is not WeightedRandomSampler
        self._content: bytes | None = None  # that of the sampler before the running epoch
        self._changes = False  # whether reading changes the sampler
        self._epochs_read: list[list[int]] = []  # as runs [start, stop)
        self._begun: _Snapshot | None = None  # of the epoch begun last
        self._loaded: _Snapshot | None = None

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
        self._loaded = _Snapshot(epoch, dict(state))
        self._begun = self._prepared = None

    def _fixed_length(self) -> int | None:
        """Return the sampler's length; None if it has none, or `set_epoch` may change it."""
        return None if hasattr(self._sampler, "set_epoch") else length_of(self._sampler)

    def _begin_epoch(self, epoch: int) -> None:
        """Prepare the sampler for the iteration of an epoch."""
        self._finish_epoch()
        loaded = self._loaded_for(epoch)
        if loaded is not None and "sampler" in loaded and self._is_stateful:
            self._sampler.load_state_dict(deepcopy(loaded["sampler"]))
        # A state from the first epoch has no "read", because only finishing an epoch shows that reading changes it.
        if loaded is not None and ("read" in loaded or self._changes):
            self._read_again(loaded.get("read", []))
        state = self._current_state()
        self._begin(epoch)
        self._begun = _Snapshot(epoch, state)

    def _finish_epoch(self) -> None:
        """Record whether reading has changed the sampler."""
        if self._content is None:
            return
        now = copy_of(self._sampler)
        self._changes = now is not None and now.content != self._content
        self._content = None
        if self._changes and self._begun is not None:
            *before, (start, stop) = self._epochs_read
            before += [[start, stop - 1]] if stop - 1 > start else []
            self._begun = _Snapshot(self._begun.epoch, {**self._begun.state, "read": before})

    def _exhaust(self, drawn: Iterator[Any], draws: KeyedDraws, *, num_drawn: int) -> None:
        """Draw the rest of an abandoned epoch, if later epochs depend on it and its length is known."""
        self._finish_epoch()
        length = length_of(self._sampler)
        if (self._is_stateful or self._changes) and length is not None:
            with draws.active():
                # One item more than the rest, so that the sampler's code after its last yield runs.
                deque(islice(drawn, max(0, length - num_drawn) + 1), maxlen=0)

    def _state(self, epoch: int, drawn: Drawn | None = None) -> dict[str, Any]:
        """Return the state to save in an epoch, with a summary of what was drawn, or before it."""
        known = [it.state for it in (self._begun, self._loaded) if it is not None and it.epoch == epoch]
        state = known[0] if known else self._current_state()
        return state if drawn is None else {**state, "drawn": drawn._asdict()}

    def _expected(self, epoch: int) -> Drawn | None:
        """Return the summary that an epoch must match, if it was saved after a sample had been received."""
        saved = (self._loaded_for(epoch) or {}).get("drawn")
        return None if saved is None else Drawn(**saved)

    def _check(self, epoch: int, drawn: Drawn | None) -> None:
        """Check the samples drawn in an epoch against those of the saved run."""
        if self._expected(epoch) not in (None, drawn):
            name = type(self._sampler).__name__
            raise DataStateError(
                f"{name} drew another order of epoch {epoch} than in the run that was saved, so that samples would "
                "be lost and others come twice; build it as it was, over the same data. If it was, it depends on "
                "something else than generators that it holds or the global ones: give it state_dict and "
                "load_state_dict, or start the epoch anew"
            )

    def _check_agreement(self, checksum: int) -> None:
        if self._agree is not None:
            self._agree(type(self._sampler).__name__, checksum)

    def _loaded_for(self, epoch: int) -> dict[str, Any] | None:
        return self._loaded.state if self._loaded is not None and self._loaded.epoch == epoch else None

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
        """Read earlier epochs again, from the sampler's first state on."""
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
