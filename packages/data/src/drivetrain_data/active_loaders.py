"""Which loader the current batch came from: loops nest, run side by side, and are broken out of."""

from collections.abc import Sequence
from typing import Any, Protocol

from drivetrain_data._nested import Nested
from drivetrain_data.errors import AmbiguousLoaderError
from drivetrain_data.remainder import trim, trim_objects
from drivetrain_data.sampling.step_info import BatchPlan


class Planned(Protocol):
    """What is tracked here: a loader that knows its current batch, and what of it an optimizer has stepped on."""

    @property
    def current(self) -> BatchPlan | None:
        """What is known of the batch last yielded; None outside a loop."""
        ...

    def mark_stepped(self) -> None:
        """Note that an optimizer has stepped on all that was received."""
        ...


class ActiveLoaders:
    """The loaders being read, the one that yielded last on top.

    An evaluation loop inside a training loop takes the top and gives it back when it ends. Two loaders read side by
    side change places with every batch; where their batches would be trimmed differently, a call must name one.

    Attributes:
        left: What was known of the last batch of a loop that has ended since the last batch of any; else None.
    """

    def __init__(self) -> None:
        self.left: BatchPlan | None = None
        self._stack: list[Planned] = []
        self._alternating: set[int] = set()

    @property
    def current(self) -> Planned | None:
        """The loader that yielded last, of those still being read."""
        return self._stack[-1] if self._stack else None

    @property
    def ending(self) -> BatchPlan | None:
        """The current batch, if an epoch ends with it: of the current loader, or of one read side by side with it."""
        for loader in self._side_by_side() if self._stack else ():
            plan = loader.current
            if plan is not None and plan.is_last:
                return plan
        return None

    def push(self, loader: Planned) -> None:
        """Note that a loader yields. Called for each batch."""
        stack = self._stack
        self.left = None
        if stack and stack[-1] is loader:
            return
        for place, other in enumerate(stack):
            if other is loader:
                # Those above began after it and are not done: they are read in turns.
                self._alternating.update(map(id, stack[place:]))
                del stack[place]
                break
        stack.append(loader)

    def pop(self, loader: Planned) -> None:
        """Note that a loader's loop is over, or was broken out of."""
        self.left = loader.current
        self._stack = [other for other in self._stack if other is not loader]
        self._alternating.discard(id(loader))

    def mark_stepped(self) -> None:
        """Note that an optimizer has stepped on all that was received of the loaders being read."""
        for loader in self._stack:
            loader.mark_stepped()

    def plan(self, loader: Planned | None = None) -> BatchPlan | None:
        """What is known of the current batch.

        Args:
            loader: Whose batch; by default that of the loader that yielded last.

        Returns:
            None outside any loop.

        Raises:
            AmbiguousLoaderError: Two loaders are read side by side and their batches differ in what counts.
        """
        if loader is not None:
            return loader.current
        if not self._stack:
            return None
        top = self._stack[-1].current
        for loader in self._side_by_side()[:-1] if self._alternating else ():
            if not _same_trim(top, loader.current):
                raise AmbiguousLoaderError(
                    "two loaders are read side by side, and their current batches hold different numbers of real "
                    f"samples ({_shown(top)} and {_shown(loader.current)}); say whose batch this is: loader="
                )
        return top

    def _side_by_side(self) -> Sequence[Planned]:
        """The current loader, last, after those that are read in turns with it."""
        stack = self._stack
        if stack and id(stack[-1]) in self._alternating:
            return [loader for loader in stack if id(loader) in self._alternating]
        return stack[-1:]

    def trim(self, gathered: Nested, *, loader: Planned | None = None, rows: Nested | None = None) -> Nested:
        """Leave the real samples of the current batch in nested tensors gathered rank by rank; see `trim`."""
        return trim(self.plan(loader), gathered, rows=rows)

    def trim_objects(self, by_rank: Sequence[Any], *, loader: Planned | None = None) -> list[Any]:
        """Leave the real samples of the current batch in one object a rank; see `trim_objects`."""
        return trim_objects(self.plan(loader), by_rank)


def _same_trim(one: BatchPlan | None, other: BatchPlan | None) -> bool:
    if one is None or other is None:
        return True
    if all(plan.is_whole and plan.even for plan in (one, other)):
        return True  # nothing is to be trimmed or weighed of either
    return one.real_counts == other.real_counts and one.sizes == other.sizes


def _shown(plan: BatchPlan | None) -> str:
    return "none" if plan is None or plan.real_counts is None else "+".join(map(str, plan.real_counts))
