"""Which loader is being read: what an accumulation window and a gather for metrics need to know."""

from typing import Protocol

from drivetrain_data.errors import AmbiguousLoaderError
from drivetrain_data.partition import BatchPlan


class Reading(Protocol):
    """A loader that is being read."""

    current: BatchPlan | None


class ActiveLoaders:
    """The loaders being read, the one that yielded last on top.

    A loop inside another's body reads its loader to the end (or breaks) before the outer one goes on; two loaders
    that are zipped yield in turn. They are told apart by who yields while the other is open.
    """

    def __init__(self) -> None:
        self._open: list[Reading] = []
        self._in_turn: list[Reading] = []  # those that yielded while another, opened later, was open

    @property
    def current(self) -> Reading | None:
        """The loader that yielded last and is still being read; None outside any loop."""
        return self._open[-1] if self._open else None

    def opened(self, loader: Reading) -> None:
        """A loader is about to yield its first batch."""
        self._open.append(loader)

    def yields(self, loader: Reading) -> None:
        """A loader yields; called only where it is not on top."""
        if self._open[-1] is not loader:
            for one in (loader, *self._open[self._open.index(loader) + 1 :]):
                if one not in self._in_turn:
                    self._in_turn.append(one)
            self._open.remove(loader)
            self._open.append(loader)

    def closed(self, loader: Reading) -> None:
        """A loader was read to its end, or its loop was left."""
        for loaders in (self._open, self._in_turn):
            if loader in loaders:
                loaders.remove(loader)

    def plan(self, loader: Reading | None = None) -> BatchPlan | None:
        """What is known of the current batch.

        Args:
            loader: Whose batch is meant; the current loader's by default.

        Raises:
            AmbiguousLoaderError: Two loaders are read in turn, and their batches differ in what is real.
        """
        chosen = loader or self.current
        if chosen is None:
            return None
        if loader is None and chosen in self._in_turn:
            for other in self._in_turn:
                if other.current is not None and chosen.current is not None:
                    _check_alike(chosen.current, other.current)
        return chosen.current

    @property
    def window_ends(self) -> bool:
        """Whether the current loader's epoch, or that of one read in turn with it, ends with its current batch."""
        current = self.current
        if current is None:
            return False
        together = self._in_turn if current in self._in_turn else [current]
        return any(one.current is not None and one.current.is_last for one in together)


def _check_alike(one: BatchPlan, other: BatchPlan) -> None:
    if (one.sizes, one.real) != (other.sizes, other.real):
        raise AmbiguousLoaderError(
            f"two loaders are read side by side, and of their current batches {one.real} and {other.real} samples a "
            "rank are real: say whose batch is meant with loader="
        )
