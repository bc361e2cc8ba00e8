"""Prepare a user's sampler for an epoch: restore its state, call `set_epoch` and seed its generators."""

from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import WeightedRandomSampler

from drivetrain_data.errors import DataStateError
from drivetrain_data.randomness.generators import KeyedDraws
from drivetrain_data.state.sampler_generators import seed_own_generators
from drivetrain_data.state.sampler_objects import SamplerCopy, copy_of, length_of


@runtime_checkable
class StatefulSampler(Protocol):
    """A sampler with a state dict, for state that changes from epoch to epoch besides its generators."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that the next iteration depends on."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load the state that `state_dict` returned."""
        ...


class Drawn(NamedTuple):
    """A summary of the samples drawn in an epoch, which a resume compares with what it draws.

    Attributes:
        length: The number of positions drawn.
        checksum: The checksum of the samples drawn.
    """

    length: int
    checksum: int


class EpochStart:
    """A controller that starts the epochs of a user's sampler so that a resume can start the same epoch again.

    A sampler with a `state_dict` gets its state back. A sampler without one whose attributes change when it is read
    is read again from its first epoch on.

    Args:
        sampler: The user's sampler or batch sampler.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._is_stateful = isinstance(sampler, StatefulSampler)
        self._told: tuple[int, int] | None = None
        self._first: SamplerCopy | None = None  # the sampler before its first epoch
        self._copies = not self._is_stateful and type(sampler) is not WeightedRandomSampler
        self._before: bytes | None = None
        self._changes = False
        self._read: list[list[int]] = []  # the epochs in which the sampler was read, as runs [start, stop)
        self._begun: tuple[int, dict[str, Any]] | None = None  # the epoch begun last, and the state before it
        self._resumed: tuple[int, dict[str, Any]] | None = None
        self._expected: Drawn | None = None  # the summary that the resumed epoch must match

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
            self._tell(seed, epoch)
        return len(self.sampler)

    def _tell(self, seed: int, epoch: int) -> None:
        if self._told != (seed, epoch):
            self.finish()
            if self._first is None and self._copies:
                self._first = copy_of(self.sampler)
                self._copies = self._first is not None
            prepare_sampler(self.sampler, seed, epoch)
            self._told = (seed, epoch)

    def begin(self, seed: int, epoch: int) -> None:
        """Prepare the sampler for the iteration of an epoch."""
        self.finish()
        resumes = self._resumed is not None and self._resumed[0] == epoch
        resumed = self._resumed[1] if self._resumed is not None and resumes else {}
        if "sampler" in resumed and self._is_stateful:
            self.sampler.load_state_dict(deepcopy(resumed["sampler"]))
        # A state from the first epoch has no "read", because only finishing an epoch shows that reading changes it.
        if "read" in resumed or (resumes and self._changes):
            self._read_again(seed, resumed.get("read", []))
        leads = {"sampler": deepcopy(self.sampler.state_dict())} if self._is_stateful else {}
        if self._changes:
            leads["read"] = [list(run) for run in self._read]
        self._begin(seed, epoch)
        self._begun = (epoch, leads)

    def finish(self) -> None:
        """Record whether reading has changed the sampler."""
        if self._before is None:
            return
        now = copy_of(self.sampler)
        self._changes = now is not None and now.content != self._before
        self._before = None
        if self._changes and self._begun is not None:
            epoch, leads = self._begun
            self._begun = (epoch, {**leads, "read": _without_last(self._read)})

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
        found = self._leads_to(epoch)
        if drawn is None:
            return found
        length, checksum = drawn
        return {**found, "drawn": {"length": length, "checksum": checksum}}

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Start the epoch later from the state that `state` returned."""
        self._resumed = (epoch, dict(state))
        self._expected = Drawn(**state["drawn"]) if "drawn" in state else None
        self._begun = self._told = None

    def expected(self, epoch: int) -> Drawn | None:
        """Return the summary that a resumed epoch must match; None for any other epoch."""
        return self._expected if self._resumed is not None and self._resumed[0] == epoch else None

    def check(self, epoch: int, drawn: Drawn | None) -> None:
        """Check the samples drawn in an epoch against those of the saved run.

        Raises:
            DataStateError: The sampler drew other samples.
        """
        expected = self.expected(epoch)
        if expected not in (None, drawn):
            name = type(self.sampler).__name__
            raise DataStateError(
                f"{name} drew another order of epoch {epoch} than in the run that was saved, so that samples would "
                "be lost and others come twice; build it as it was, over the same data. If it was, it depends on "
                "something else than generators that it holds or the global ones: give it state_dict and "
                "load_state_dict, or start the epoch anew"
            )

    def _leads_to(self, epoch: int) -> dict[str, Any]:
        for known in (self._begun, self._resumed):
            if known is not None and known[0] == epoch:
                return known[1]
        found = {"sampler": deepcopy(self.sampler.state_dict())} if self._is_stateful else {}
        return {**found, "read": [list(run) for run in self._read]} if self._changes else found

    def _begin(self, seed: int, epoch: int) -> None:
        self._told = None
        self._tell(seed, epoch)
        before = copy_of(self.sampler) if self._copies and not self._changes else None
        self._before = None if before is None else before.content
        if self._read and self._read[-1][1] == epoch:
            self._read[-1][1] += 1
        else:
            self._read.append([epoch, epoch + 1])

    def _read_again(self, seed: int, runs: list[list[int]]) -> None:
        """Read earlier epochs again, from the sampler's first state on."""
        if self._first is not None:
            self._first.restore()
        self._read = []
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
