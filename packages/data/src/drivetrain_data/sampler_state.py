"""A user's sampler at the start of an epoch: told of it, generators seeded, its own state kept or brought back."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

from drivetrain_data.rng import seed_own_generators


@runtime_checkable
class StatefulSampler(Protocol):
    """A sampler that changes from epoch to epoch by more than generators, and can say how far it has come."""

    def state_dict(self) -> Mapping[str, Any]:
        """What the next iteration depends on."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take up what `state_dict` gave."""
        ...


class EpochStart:
    """Begins the epochs of a user's sampler, so that one can be begun again.

    Args:
        sampler: The user's.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._is_stateful = isinstance(sampler, StatefulSampler)
        self._begun: tuple[int, Any] | None = None  # the epoch begun last, and the state before it
        self._resumed: tuple[int, Any] | None = None

    def begin(self, seed: int, epoch: int) -> None:
        """Prepare the sampler to be iterated for an epoch."""
        if self._is_stateful:
            if self._resumed is not None and self._resumed[0] == epoch:
                self.sampler.load_state_dict(deepcopy(self._resumed[1]))
            self._begun = (epoch, deepcopy(self.sampler.state_dict()))
        prepare_sampler(self.sampler, seed, epoch)

    def how(self, seed: int) -> str:
        """How an epoch comes about, as one phrase for people."""
        own = "from its saved state, " if self._is_stateful else ""
        return f"drawn on every rank {own}with its own and the global generators seeded from (seed {seed}, epoch)"

    def state(self, epoch: int) -> dict[str, Any]:
        """What must be saved in an epoch, or before it: the sampler's own state at its start, if it has one."""
        for known in (self._begun, self._resumed):
            if known is not None and known[0] == epoch:
                return {"sampler": known[1]}
        if self._is_stateful:
            return {"sampler": deepcopy(self.sampler.state_dict())}
        return {}

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Let the epoch begin with what `state` gave."""
        self._resumed = (epoch, state["sampler"]) if "sampler" in state else None
        self._begun = None


def prepare_sampler(sampler: object, seed: int, epoch: int) -> None:
    """Tell a sampler the epoch and seed the generators that it holds."""
    set_epoch = getattr(sampler, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
    seed_own_generators(sampler, seed, epoch)
