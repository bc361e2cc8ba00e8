"""Functions of tensors that threads divide by columns, compared with those of the whole; and what they allocate."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from drivetrain_parallel.outputs.divided_tensor import DividedTensor, divided
from drivetrain_parallel.outputs.layout import PartLayout
from drivetrain_parallel.ranks import TensorRanks
from parallel.divided import ThreadRanks, assert_near, on_threads

Function = Callable[[Tensor], Tensor]


def of_columns(part: Tensor, sizes: tuple[int, ...], ranks: TensorRanks) -> DividedTensor:
    """Return the tensor of which each rank holds some columns."""
    return divided(part, PartLayout.of_columns(part, sizes, ranks), "head")


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
        found = function(of_columns(part * 1, tuple(sizes), ranks))
        is_divided, joined_by = isinstance(found, DividedTensor), ranks.joined_by
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


class OneOfTwo:
    """A rank of two that hears itself in place of the other, to measure what it allocates."""

    rank, size = 0, 2

    def add_up(self, tensor: Tensor) -> None: ...

    def join(self, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        return torch.cat([tensor] * 2, dim)

    def exchange(self, tensor: Tensor, sent: object = None, received: object = None) -> Tensor:
        return tensor

    def meet(self, place: str, by: str) -> None: ...


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that `work` allocates at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [one for one in recorded.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
