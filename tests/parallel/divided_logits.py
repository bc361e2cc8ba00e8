"""Functions of logits that threads divide by words, compared with the same functions of the whole logits."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drivetrain_parallel.outputs.vocabulary_logits import DividedLogits, divided_logits
from parallel.divided import ThreadRanks, assert_near, on_threads

Function = Callable[[Tensor], Tensor]


def assert_same_of_parts(
    function: Function, whole: Tensor, sizes: Sequence[int], *, tolerance: float = 1e-11
) -> tuple[bool, str]:
    """Assert that each rank computes a function of divided logits as of the whole, and its gradient.

    Return whether what it returns is divided, and which function joined the logits before they were looked at.
    """
    expected, gradient, weights = _computed(function, whole)

    def work(ranks: ThreadRanks) -> tuple[bool, str]:
        first = sum(sizes[: ranks.rank])
        own = (..., slice(first, first + sizes[ranks.rank]))
        part = whole[own].detach().clone().requires_grad_()
        found = function(divided_logits(part * 1, tuple(sizes), ranks, "head"))
        is_divided, joined_by = isinstance(found, DividedLogits), ranks.joined_by
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        if weights is not None:
            (found * weights).sum().backward()
            assert_near("the gradient", part.grad, gradient[own], tolerance)
        assert_near("the value", found.detach().double(), expected.detach().double(), tolerance)
        return is_divided, joined_by

    first, *others = on_threads(len(sizes), work)
    assert all(one == first for one in others)
    return first


def _computed(function: Function, whole: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    leaf = whole.detach().clone().requires_grad_()
    found = function(leaf * 1)
    if not found.requires_grad:
        return found, torch.zeros_like(leaf), None
    weights = torch.linspace(-1, 2, found.numel(), dtype=torch.float64).view(found.shape).to(found.dtype)
    (found * weights).sum().backward()
    assert leaf.grad is not None
    return found, leaf.grad, weights
