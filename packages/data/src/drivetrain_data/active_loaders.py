"""Track which loader the current batch came from, for loops that nest, alternate or end early."""

from collections.abc import Callable, Sequence
from typing import Protocol

from drivetrain_data.errors import AmbiguousLoaderError
from drivetrain_data.sampling.step_info import BatchPlan


class Planned(Protocol):
    """A loader that knows its current batch and can record that an optimizer has stepped."""

    @property
    def num_received(self) -> int:
        """The number of batches yielded in all loops so far, which identifies the current one."""
        ...

    @property
    def current(self) -> BatchPlan | None:
        """The plan of the batch yielded last; None outside a loop."""
        ...

    def mark_stepped(self) -> None:
        """Record that an optimizer has stepped on every batch received so far."""
        ...


class LoaderTracker:
    """A stack of the loaders being read, with the loader that yielded last on top.

    An evaluation loop inside a training loop pushes its loader and pops it at its end. Two loaders read in turns swap
    places with every batch; if their batches would be trimmed differently, a call must name the loader.

    Attributes:
        left: The plan of the last batch of the loop that ended last; None once any loader yields again.
        on_finish: A function to call with a loader when its loop has read the epoch's last batch; may be None.
    """

    def __init__(self) -> None:
        self.left: BatchPlan | None = None
        self.on_finish: Callable[[Planned], None] | None = None
        self._stack: list[Planned] = []
        self._alternating: set[int] = set()

    @property
    def current(self) -> Planned | None:
        """The loader that yielded last and is still being read; None if there is none."""
        return self._stack[-1] if self._stack else None

    @property
    def being_read(self) -> Sequence[Planned]:
        """The loaders in running loops; the loader that yielded last is the last item."""
        return self._stack

    def push(self, loader: Planned) -> None:
        """Record that a loader yields a batch. Called for each batch."""
        stack = self._stack
        self.left = None
        if stack and stack[-1] is loader:
            return
        for place, other in enumerate(stack):
            if other is loader:
                # The loaders above it started later and have not ended, so all of them are read in turns.
                self._alternating.update(map(id, stack[place:]))
                del stack[place]
                break
        stack.append(loader)

    def finish(self, loader: Planned) -> None:
        """Record that a loop has read its epoch to the end; the loop then calls `pop`."""
        if self.on_finish is not None:
            self.on_finish(loader)

    def pop(self, loader: Planned) -> None:
        """Record that the loop over a loader has ended or was left early."""
        self.left = loader.current
        self._stack = [other for other in self._stack if other is not loader]
        self._alternating.discard(id(loader))

    def mark_stepped(self) -> None:
        """Record that an optimizer has stepped on every batch received from the loaders being read."""
        for loader in self._stack:
            loader.mark_stepped()

    def plan(self, loader: Planned | None = None) -> BatchPlan | None:
        """Return the plan of a loader's current batch, by default the loader on top; None outside any loop.

        AmbiguousLoaderError if two loaders are read in turns, and their batches would be trimmed differently.
        """
        if loader is not None:
            return loader.current
        if not self._stack:
            return None
        top = self._stack[-1].current
        for loader in self.read_in_turns()[:-1] if self._alternating else ():
            if not _same_trim(top, loader.current):
                raise AmbiguousLoaderError(
                    "two loaders are read side by side, and their current batches hold different numbers of real "
                    f"samples ({_shown(top)} and {_shown(loader.current)}); say whose batch this is: loader="
                )
        return top

    def read_in_turns(self) -> Sequence[Planned]:
        """Return the loaders that are read in turns, the current loader last; empty outside a loop."""
        stack = self._stack
        if stack and id(stack[-1]) in self._alternating:
            return [loader for loader in stack if id(loader) in self._alternating]
        return stack[-1:]


def _same_trim(one: BatchPlan | None, other: BatchPlan | None) -> bool:
    if one is None or other is None:
        return True
    if all(plan.is_whole and plan.even for plan in (one, other)):
        return True  # neither batch needs trimming or weighting
    return one.real_counts == other.real_counts and one.sizes == other.sizes


def _shown(plan: BatchPlan | None) -> str:
    return "none" if plan is None or plan.real_counts is None else "+".join(map(str, plan.real_counts))
