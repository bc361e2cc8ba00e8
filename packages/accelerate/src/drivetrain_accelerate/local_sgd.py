"""Local SGD: each rank steps on its own gradients, and every few steps the ranks average their weights."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import nn

from drivetrain_backends.local_updates.exchange_plan import ExchangePlan
from drivetrain_backends.local_updates.local_updates import LocalUpdates

if TYPE_CHECKING:
    from drivetrain_accelerate.accelerator.accelerator import Accelerator


class LocalSGD:
    """A block in which each rank trains its own replica, and the weights are averaged every few steps.

    The method is from Stich, "Local SGD converges fast and communicates little" (2019). Sharded models are refused.
    """

    def __init__(
        self, accelerator: "Accelerator", model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if accelerator.state.divides_models:
            raise NotImplementedError(
                f"LocalSGD with {accelerator.distributed_type}: ranks hold parts of the model, and cannot train "
                "alone; use data parallelism without sharding"
            )
        if enabled and local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps={local_sgd_steps}: say how many steps, 1 or more")
        self.accelerator, self.model = accelerator, model
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps, self.local_sgd_steps = 0, local_sgd_steps
        self._updates: LocalUpdates | None = None

    def __enter__(self) -> Self:
        """Stop reducing gradients over ranks. Called on all ranks."""
        if self.enabled:
            inner = self.accelerator.inner
            never = ExchangePlan(every=sys.maxsize)  # by itself: `step` counts what the loop calls
            self._updates = LocalUpdates(inner.prepared_of(self.model), inner.context, never).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Average the weights, and reduce gradients over ranks again. Called on all ranks."""
        if self._updates is not None:
            self._updates.__exit__(kind, value, traceback)

    def step(self) -> None:
        """Count a step, and average the weights in every `local_sgd_steps`-th step. Called on all ranks."""
        self.num_steps += 1
        if self._updates is not None and self.num_steps % self.local_sgd_steps == 0:
            self._updates.exchange()
