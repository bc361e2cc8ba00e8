"""Start the epochs of a user's sampler so that a resume can start the same epoch again."""

from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import WeightedRandomSampler

from drivetrain_data.errors import DataStateError
from drivetrain_data.randomness.generators import KeyedDraws
from drivetrain_data.state.sampler_copy import SamplerCopy, copy_of
from drivetrain_data.state.sampler_parts import length_of, seed_own_generators
from drivetrain_data.state.stateful import StatefulReader


class Drawn(NamedTuple):
    """A summary of the samples drawn in an epoch, which a resume compares with what it draws.

    Attributes:
        length: The number of positions drawn.
        checksum: The checksum of the samples drawn.
    """

    length: int
    checksum: int


class _Snapshot(NamedTuple):
    """The state from which a sampler begins an epoch."""

    epoch: int
    state: dict[str, Any]


class RestorableSampler:
    """A user's sampler, with the state that each of its epochs begins from.

    A sampler with a `state_dict` gets its state back. A sampler without one whose attributes change when it is read
    is read again from its first epoch on. For any other, the seeds of its generators are the whole state.

    Args:
        sampler: The user's sampler or batch sampler.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
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
    def fixed_length(self) -> int | None:
        """The sampler's length; None if it has none, or `set_epoch` may change it."""
        return None if hasattr(self.sampler, "set_epoch") else length_of(self.sampler)

    def length(self, seed: int, epoch: int) -> int:
        """Return the sampler's length in an epoch.

        Raises:
            TypeError: The sampler has no length.
        """
        if hasattr(self.sampler, "set_epoch"):
            self._prepare(seed, epoch)
        return len(self.sampler)

    def begin(self, seed: int, epoch: int) -> None:
        """Prepare the sampler for the iteration of an epoch."""
        self.finish()
        loaded = self._loaded_for(epoch)
        if loaded is not None and "sampler" in loaded and self._is_stateful:
            self.sampler.load_state_dict(deepcopy(loaded["sampler"]))
        # A state from the first epoch has no "read", because only finishing an epoch shows that reading changes it.
        if loaded is not None and ("read" in loaded or self._changes):
            self._read_again(seed, loaded.get("read", []))
        state = self._current_state()
        self._begin(seed, epoch)
        self._begun = _Snapshot(epoch, state)

    def finish(self) -> None:
        """Record whether reading has changed the sampler."""
        if self._content is None:
            return
        now = copy_of(self.sampler)
        self._changes = now is not None and now.content != self._content
        self._content = None
        if self._changes and self._begun is not None:
            before = _without_last(self._epochs_read)
            self._begun = _Snapshot(self._begun.epoch, {**self._begun.state, "read": before})

    def exhaust(self, drawn: Iterator[Any], draws: KeyedDraws, *, num_drawn: int) -> None:
        """Draw the rest of an abandoned epoch, if later epochs depend on it and its length is known."""
        self.finish()
        length = length_of(self.sampler)
        if (self._is_stateful or self._changes) and length is not None:
            with draws.active():
                # One item more than the rest, so that the sampler's code after its last yield runs.
                deque(islice(drawn, max(0, length - num_drawn) + 1), maxlen=0)

    def how(self, seed: int) -> str:
        """Describe how an epoch is drawn, as a phrase for users."""
        own = "from its saved state, " if self._is_stateful else ""
        if self._changes:
            own = "after all epochs before it, since reading changes it, "
        return f"drawn on every rank {own}with its own and the global generators seeded from (seed {seed}, epoch)"

    def state(self, epoch: int, drawn: Drawn | None = None) -> dict[str, Any]:
        """Return the state to save in an epoch or before it.

        Args:
            epoch: The number of the epoch.
            drawn: The summary of the samples drawn; None if no sample has been received.
        """
        known = [it.state for it in (self._begun, self._loaded) if it is not None and it.epoch == epoch]
        state = known[0] if known else self._current_state()
        return state if drawn is None else {**state, "drawn": drawn._asdict()}

    def load_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Start the epoch later from the state that `state` returned."""
        self._loaded = _Snapshot(epoch, dict(state))
        self._begun = self._prepared = None

    def expected(self, epoch: int) -> Drawn | None:
        """Return the summary that an epoch must match, if it was saved after a sample had been received."""
        saved = (self._loaded_for(epoch) or {}).get("drawn")
        return None if saved is None else Drawn(**saved)

    def check(self, epoch: int, drawn: Drawn | None) -> None:
        """Check the samples drawn in an epoch against those of the saved run.

        Raises:
            DataStateError: The sampler drew other samples.
        """
        if self.expected(epoch) not in (None, drawn):
            name = type(self.sampler).__name__
            raise DataStateError(
                f"{name} drew another order of epoch {epoch} than in the run that was saved, so that samples would "
                "be lost and others come twice; build it as it was, over the same data. If it was, it depends on "
                "something else than generators that it holds or the global ones: give it state_dict and "
                "load_state_dict, or start the epoch anew"
            )

    def _loaded_for(self, epoch: int) -> dict[str, Any] | None:
        return self._loaded.state if self._loaded is not None and self._loaded.epoch == epoch else None

    def _current_state(self) -> dict[str, Any]:
        state = {"sampler": deepcopy(self.sampler.state_dict())} if self._is_stateful else {}
        return {**state, "read": [list(run) for run in self._epochs_read]} if self._changes else state

    def _prepare(self, seed: int, epoch: int) -> None:
        if self._prepared == (seed, epoch):
            return
        self.finish()
        if self._first is None and self._is_copied:
            self._first = copy_of(self.sampler)
            self._is_copied = self._first is not None
        prepare_sampler(self.sampler, seed, epoch)
        self._prepared = (seed, epoch)

    def _begin(self, seed: int, epoch: int) -> None:
        self._prepared = None
        self._prepare(seed, epoch)
        before = copy_of(self.sampler) if self._is_copied and not self._changes else None
        self._content = None if before is None else before.content
        if self._epochs_read and self._epochs_read[-1][1] == epoch:
            self._epochs_read[-1][1] += 1
        else:
            self._epochs_read.append([epoch, epoch + 1])

    def _read_again(self, seed: int, runs: list[list[int]]) -> None:
        """Read earlier epochs again, from the sampler's first state on."""
        if self._first is not None:
            self._first.restore()
        self._epochs_read = []
        self._changes = True
        for start, stop in runs:
            for epoch in range(start, stop):
                self._begin(seed, epoch)
                with KeyedDraws(seed, epoch).active():
                    deque(iter(self.sampler), maxlen=0)


def prepare_sampler(sampler: object, seed: int, epoch: int) -> None:
    """Call a sampler's `set_epoch`, if it has one, and seed the generators that it holds."""
    set_epoch = getattr(sampler, "set_epoch", None)
    if set_epoch is not None:
        # Seed before as well as after, because set_epoch may draw.
        seed_own_generators(sampler, seed, epoch)
        with KeyedDraws(seed, epoch).active():
            set_epoch(epoch)
    seed_own_generators(sampler, seed, epoch)


def _without_last(runs: list[list[int]]) -> list[list[int]]:
    *others, (start, last) = runs
    return [*others, [start, last - 1]] if last - 1 > start else others
