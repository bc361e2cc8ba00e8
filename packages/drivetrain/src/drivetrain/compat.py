"""The private names of torch that this package uses, in one place.

torch has no public API for them. They are the same in torch 2.9 to 2.15; tests/drivetrain/test_compat.py holds each
one to what is relied on, and docs/platforms.md lists them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def schedulers_in(scheduler: Any) -> Sequence[Any]:
    """Return the schedulers that a `SequentialLR` or `ChainedScheduler` is made of; none for another one."""
    return getattr(scheduler, "_schedulers", ())


def milestones_of(scheduler: Any) -> Sequence[int]:
    """Return the steps at which a `SequentialLR` goes on to its next scheduler; none for another one."""
    return getattr(scheduler, "_milestones", ())


class ModelFlopCounter(FlopCounterMode):
    """A counter of a model's floating point operations, without those that compute something a second time.

    Attributes:
        is_in_backward: Whether what runs belongs to a backward; set by the caller.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.is_in_backward = False
        self.flop_registry: dict[Any, Callable[..., int]] = {
            operation: _without_scores(formula) if _is_attention_backward(operation) else formula
            for operation, formula in self.flop_registry.items()
        }

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # Autograd computes gradients with grad mode off. What runs with grad mode on inside a backward builds a graph
        # again: a forward that activation checkpointing repeats.
        if self.is_in_backward and torch.is_grad_enabled():
            return out
        return super()._count_flops(func_packet, out, args, kwargs)


def _is_attention_backward(operation: Any) -> bool:
    name = str(operation)
    return "attention" in name and "backward" in name


def _without_scores(formula: Callable[..., int]) -> Callable[..., int]:
    """Return the formula of a fused attention's backward without the first of its five products.

    It computes the scores again, which the forward has not kept. The products are of one size where queries and
    values are.
    """
    return lambda *args, **kwargs: formula(*args, **kwargs) * 4 // 5
