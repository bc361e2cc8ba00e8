"""Helpers for trials of an optimizer on small parameters: visible learning rates and uncompiled steps."""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor

_SMALLEST = 0.05
_SMALLEST_IN_HALF = 1.0  # in half precision, where rounding hides smaller movements


def set_visible_rates(groups: Iterable[dict[str, Any]]) -> None:
    """Raise the learning rates of a copied optimizer's parameter groups to a size that moves visibly.

    A rate that is neither a number nor a tensor, such as the None of an optimizer that finds its own, is kept.

    Args:
        groups: The parameter groups of a copy; the original's groups must be other objects.
    """
    for group in groups:
        rate, initial = group.get("lr"), group.get("initial_lr")
        if isinstance(rate, bool) or not isinstance(rate, (Real, Tensor)):
            continue
        is_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in group["params"])
        sizes = [float(one) for one in (rate, initial) if isinstance(one, (Real, Tensor))]
        visible = max(_SMALLEST_IN_HALF if is_half else _SMALLEST, *sizes)
        group["lr"] = torch.full_like(rate, visible) if isinstance(rate, Tensor) else visible


def run_eagerly() -> AbstractContextManager[object]:
    """Run a compiled step in eager mode in the block, because compiling it for each shape takes minutes.

    Does nothing unless the compiler is imported: importing it takes seconds, and a compiled optimizer has done so.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
