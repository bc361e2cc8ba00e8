"""The private names of torch's counter of operations; tests/throughput/flops/test_compat.py holds each one."""

from collections.abc import Callable
from math import prod
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle


class ModelFlopCounter(FlopCounterMode):
    """A counter of a model's operations. It leaves out forwards that are repeated inside a backward."""

    def __init__(self, *, is_in_backward: bool) -> None:
        super().__init__(display=False)
        self.is_in_backward = is_in_backward
        self.num_weighted = 0  # operations times the ranks among which they are divided
        self._num_parts = [1]  # of the modules whose forward is running
        self._hooks: list[RemovableHandle] = []
        self.flop_registry: dict[Any, Callable[..., int]] = {
            operation: _without_scores(formula)
            if "attention" in str(operation) and "backward" in str(operation)
            else formula
            for operation, formula in self.flop_registry.items()
        }

    def __enter__(self) -> Self:
        super().__enter__()
        self._hooks = [
            register_module_forward_pre_hook(self._begin_forward),
            register_module_forward_hook(self._end_forward, always_call=True),  # repeats may end early
        ]
        return self

    def __exit__(self, *error: Any) -> Any:
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*error)

    def _begin_forward(self, module: Any, args: tuple[Any, ...]) -> None:
        given = args[: not hasattr(module, "takes_its_part")]  # what such a block says holds for any argument
        known = [one.divided_among for one in (module, *given) if hasattr(one, "divided_among")]
        self._num_parts.append(prod(known) if known else self._num_parts[-1])

    def _end_forward(self, *_: Any) -> None:
        self._num_parts.pop()

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # Autograd computes gradients with grad mode off. What runs with grad mode on inside a backward builds a graph
        # again: a forward that activation checkpointing repeats. The forward of an autograd.Function in it, as those
        # of linear layers under ZeRO 3, turns grad mode off, but runs inside a module.
        if self.is_in_backward and (torch.is_grad_enabled() or len(self._num_parts) > 1):
            return out
        before = self.get_total_flops()
        super()._count_flops(func_packet, out, args, kwargs)
        self.num_weighted += (self.get_total_flops() - before) * self._num_parts[-1]
        return out


def _without_scores(formula: Callable[..., int]) -> Callable[..., int]:
    """Return the formula of a fused attention's backward without the first of its five products.

    The first product recomputes the scores, which the forward has not kept. All five products have one size if
    queries and values have one size.
    """
    return lambda *args, **kwargs: formula(*args, **kwargs) * 4 // 5
