"""Count the samples and tokens of each step, from the batches that had a backward in the step."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from drivetrain_data import BatchPlan
from drivetrain_throughput.meter import Counts
from drivetrain_tracking import TrackingSettings

logger = logging.getLogger(__name__)


class BatchCounts:
    """The samples of all ranks and the tokens of this rank, for the open step and for ended steps not yet taken.

    Args:
        is_main: Whether to warn of batches without the token field.

    Attributes:
        count_tokens: A function from a batch to the number of tokens of this rank; None counts the elements of the
            token field.
    """

    def __init__(self, token_field: str, *, is_main: bool) -> None:
        self.count_tokens: Callable[[Any], float] | None = None
        self._token_field = token_field
        # Nobody named the default field: batches without tokens are none of its business.
        self._warns = is_main and token_field != TrackingSettings().token_field
        self._received: Counts | None = None  # the newest batch, until it is counted
        self._open = Counts()
        self._ended: deque[Counts] = deque()

    def receive(self, plan: BatchPlan, batch: Any) -> None:
        """Take a batch, which counts if it has a backward before the next batch comes."""
        known = plan.real_counts is not None and plan.sizes is not None
        self._received = Counts(float(sum(plan.real_counts or ())) if known else None, self._tokens(batch))

    def count_received(self) -> None:
        """Count the newest batch once, at its backward: batches without a backward are for evaluation."""
        if self._received is not None:
            self._open, self._received = self._open.plus(self._received), None

    def end_step(self) -> None:
        """End the open step."""
        self._ended.append(self._open)
        self._open = Counts()

    def take_step(self) -> Counts:
        """Return the counts of the earliest ended step that was not taken yet."""
        return self._ended.popleft()

    def _tokens(self, batch: Any) -> float | None:
        if self.count_tokens is not None:
            return float(self.count_tokens(batch))
        field = batch.get(self._token_field) if hasattr(batch, "get") else None
        if isinstance(field, Tensor):
            return float(field.numel())
        if self._warns:
            self._warns = False
            fields = ", ".join(map(str, batch)) if hasattr(batch, "keys") else ""
            logger.warning(
                "token_field=%r: the batch, a %s, has no tensor of that name%s; throughput/tokens_per_second is left "
                "out. Name a field that every batch has, or count with accelerator.count_tokens(function)",
                self._token_field,
                type(batch).__name__,
                f" among its fields {fields}" if fields else "",
            )
        return None
