"""Count the matrix products of a run's first step, inside its forwards and backwards."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import get_ident

import torch
from torch import nn

from drivetrain_backends import unwrap_compiled
from drivetrain_precision.fp8.product_counts import ProductCounts
from drivetrain_precision.fp8.step_verdict import StepProducts
from drivetrain_state import ProgressMark, ProgressRecord


@dataclass(slots=True)
class _Block:
    """A counted forward or backward.

    Attributes:
        counting: The context that counts.
        counts: The products, once the block has ended.
        models: The converted models that were called in the block.
    """

    counting: AbstractContextManager[ProductCounts]
    counts: ProductCounts
    models: list[nn.Module] = field(default_factory=list[nn.Module])


class FirstStepProducts:
    """The matrix products of the first step in which converted models ran and could be counted.

    Only one thread is counted: that of the step's first backward, or first forward with gradients. torch can record
    only the operations of the recording thread.

    Args:
        progress: The record to which forwards and backwards report.
        counting: A function that returns a context, which counts the products inside.
        models: The converted models; the list may grow and shrink.

    Attributes:
        unproved: The last counted step; None before the first, and after one that proves something.
    """

    def __init__(
        self,
        progress: ProgressRecord,
        counting: Callable[[], AbstractContextManager[ProductCounts]],
        models: Sequence[nn.Module],
    ) -> None:
        self._progress, self._new_counting, self._models = progress, counting, models
        self._block: _Block | None = None
        self._blocks: list[_Block] = []
        self._open: list[bool] = []  # forwards and backwards that have begun, and whether each is counted
        self._thread: int | None = None
        self._num_steps = 0
        self._is_done = False
        self.unproved: StepProducts | None = None

    def begin(self) -> None:
        """Start to listen; do nothing if it listens already, or if the first step is counted."""
        if not self._is_done and self._observe not in self._progress.observers:
            self._progress.add_observer(self._observe)
            self._progress.add_forward_observer(self._observe_model)

    def end_step(self) -> StepProducts | None:
        """Return the products of a step, or None once counting is over; end counting if they prove something."""
        if self._is_done or not self._models:
            return None
        self._num_steps += 1
        blocks, self._blocks = self._blocks, []
        step = _add_up(blocks, self._models, num_steps=self._num_steps)
        if step.hindrance is None:
            self.close()
        else:
            self.unproved = step
            if not self._open:
                self._thread = None
        return step

    def close(self) -> None:
        """Stop listening. May be called on any rank, in any thread."""
        self._is_done, self._blocks, self.unproved = True, [], None
        # torch ends a recording in its own thread alone: there, the end of the forward or backward will end it.
        if self._block is None or self._thread == get_ident():
            self._leave()

    def _observe(self, label: str) -> None:
        if not isinstance(label, ProgressMark):  # a program's own mark may have the text of a member
            return
        if self._thread is None and _trains(label):
            self._thread = get_ident()
        if self._thread != get_ident():
            return
        if label in (ProgressMark.FORWARD, ProgressMark.BACKWARD):
            self._open.append(_trains(label))
            if self._block is None and self._open[-1] and not self._is_done:
                counting = self._new_counting()
                self._block = _Block(counting, counting.__enter__())
                self._blocks.append(self._block)
        elif label in (ProgressMark.FORWARD_DONE, ProgressMark.BACKWARD_DONE) and self._open:
            self._open.pop()
            if not any(self._open):
                self._stop()  # an evaluation around it goes on uncounted
                if self._is_done:
                    self._leave()

    def _observe_model(self, model: object) -> None:
        if self._block is None or self._thread != get_ident() or not isinstance(model, nn.Module):
            return
        plain = unwrap_compiled(model)
        if any(one is plain for one in self._models) and not any(one is plain for one in self._block.models):
            self._block.models.append(plain)

    def _leave(self) -> None:
        self._progress.remove_observer(self._observe)
        self._progress.remove_forward_observer(self._observe_model)
        self._stop()

    def _stop(self) -> None:
        if self._block is not None:
            self._block.counting.__exit__(None, None, None)
            self._block = None


def _trains(label: ProgressMark) -> bool:
    """Return whether a label begins a part of a training step; evaluation before the first step does not."""
    return label is ProgressMark.BACKWARD or (label is ProgressMark.FORWARD and torch.is_grad_enabled())


def _add_up(blocks: Sequence[_Block], models: Sequence[nn.Module], *, num_steps: int) -> StepProducts:
    """Return the products of a step, the sum over its forwards and backwards."""
    all_counts = [block.counts for block in blocks]
    by_model: dict[int, int] = {}
    for place, model in enumerate(models):
        if within := [block.counts.scaled for block in blocks if any(one is model for one in block.models)]:
            by_model[place] = sum(within)
    counts = ProductCounts(
        scaled=sum(each.scaled for each in all_counts),
        others=sum(each.others for each in all_counts),
        compiled=sum(each.compiled for each in all_counts),
        is_counted=all(each.is_counted for each in all_counts),
    )
    hindrance = None
    if not counts.is_counted:
        told = (each.hindrance for each in all_counts if each.hindrance is not None)
        hindrance = next(told, "a forward or backward had not ended when the optimizer stepped")
    elif not by_model and not counts.scaled:
        hindrance = "no converted model was called with gradients"
    return StepProducts(counts=counts, scaled_by_model=by_model, hindrance=hindrance, num_steps=num_steps)
