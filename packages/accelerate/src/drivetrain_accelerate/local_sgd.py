"""Local SGD: each rank steps on its own gradients, and every few steps the ranks average their weights."""

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from drivetrain_backends import SupportsLocalSteps
from drivetrain_state.collectives.operations import reduce

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
        self.accelerator, self.model, self._held = accelerator, model, ExitStack()
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps, self.local_sgd_steps = 0, local_sgd_steps

    def __enter__(self) -> Self:
        """Stop reducing gradients over ranks. Called on all ranks."""
        prepared = self.accelerator.inner.prepared_of(self.model) if self.enabled else None
        if isinstance(prepared, SupportsLocalSteps):
            self._held.enter_context(prepared.trained_alone())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Average the weights, and reduce gradients over ranks again. Called on all ranks."""
        with self._held:
            if self.enabled and kind is None:
                self._average(with_states=True)  # momenta that differ would take replicas apart again

    def step(self) -> None:
        """Count a step, and average the weights in every `local_sgd_steps`-th step. Called on all ranks."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self, *, with_states: bool = False) -> None:
        averaged = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if with_states:
            optimizers = self.accelerator.inner.prepared_of(self.model).optimizers
            states = [state for one in optimizers for state in one.state.values()]
            averaged += [v for state in states for v in state.values() if getattr(v, "ndim", 0)]  # no counts
        means: Any = reduce(self.accelerator.inner.context, averaged, "mean", over="counts")
        for tensor, mean in zip(averaged, means, strict=True):
            tensor.copy_(mean)
