"""Count the matrix products of a run's first step, inside its forwards and backwards."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident

import torch

from drivetrain_precision.fp8.product_counts import ProductCounts
from drivetrain_state import ProgressRecord


class FirstStepProducts:
    """The products of the first step that could be counted, by what the progress record tells.

    Args:
        progress: The record that forwards and backwards tell of.
        counting: Return a context that counts the products in it.
    """

    def __init__(
        self, progress: ProgressRecord, counting: Callable[[], AbstractContextManager[ProductCounts]]
    ) -> None:
        self._progress, self._new_counting = progress, counting
        self._counting: AbstractContextManager[ProductCounts] | None = None
        self._counts: list[ProductCounts] = []
        self._open: list[bool] = []  # forwards and backwards that have begun, and whether each is counted
        self._thread = get_ident()
        self._is_done = False

    def begin(self) -> None:
        """Listen from now on; once the first step is counted, or where it listens already, nothing happens."""
        if not self._is_done and self._observe not in self._progress.observers:
            self._progress.add_observer(self._observe)

    def end_step(self) -> ProductCounts | None:
        """Return the products of the step and end the counting; None if it is over, or nothing could be counted."""
        counted, self._counts = self._counts, []
        if not counted or not all(each.is_counted for each in counted):
            return None  # another profiler recorded, or something was compiled: the next step may tell
        self.close()
        return ProductCounts(
            scaled=sum(each.scaled for each in counted),
            others=sum(each.others for each in counted),
            compiled=sum(each.compiled for each in counted),
            is_counted=True,
        )

    def close(self) -> None:
        """Listen no longer. May be called on any rank."""
        self._is_done = True
        self._progress.remove_observer(self._observe)
        self._stop()

    def _observe(self, label: str) -> None:
        if get_ident() != self._thread:
            return
        if label in ("forward", "backward"):
            # An evaluation before the first step is none of it.
            self._open.append(label == "backward" or torch.is_grad_enabled())
            if self._counting is None and self._open[-1]:
                self._counting = self._new_counting()
                self._counts.append(self._counting.__enter__())
        elif label in ("forward done", "backward done") and self._open:
            self._open.pop()
            if not any(self._open):
                self._stop()  # an evaluation around it goes on uncounted

    def _stop(self) -> None:
        if self._counting is not None:
            self._counting.__exit__(None, None, None)
            self._counting = None
