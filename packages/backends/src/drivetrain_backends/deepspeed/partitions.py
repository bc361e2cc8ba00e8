"""A rank's partition of a parameter under ZeRO: a range of elements of its master or optimizer state."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends.deepspeed import compat


class PartitionedTensor:
    """A tensor divided into a range of elements for each rank, and gathered on demand.

    `gather` returns the full tensor and is called on all ranks. `own` returns the index of this rank's first element,
    and this rank's elements.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        gather: Callable[[], Tensor],
        own: Callable[[], tuple[int, Tensor]],
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self._gather = gather
        self._own = own

    def full_tensor(self) -> Tensor:
        """Return the full tensor. Called on all ranks, in the same order."""
        return self._gather()

    def flat_range(self) -> tuple[int, Tensor]:
        """Return the row-major index of this rank's first element, and this rank's elements, of shape (n,)."""
        return self._own()


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Return whether ranks hold partitions of a parameter or of its master."""
    return compat.is_divided(parameter) or compat.has_master(parameter)


@contextmanager
def as_trained(parameter: Any) -> Generator[None]:
    """Make a frozen parameter's master accessible in the block, where stage 3 (0.19) reports that it has none."""
    before = parameter.requires_grad
    parameter.requires_grad_(before or compat.has_master(parameter))
    try:
        yield
    finally:
        parameter.requires_grad_(before)


def own_range(parameter: Any) -> tuple[int, int]:
    """Return the start and the stop of this rank's range among a parameter's elements."""
    if compat.is_divided(parameter):
        size, number = compat.part_size(parameter), compat.num_elements(parameter)
        start = min(size * dist.get_rank(compat.group_of(parameter)), number)
        return start, min(start + size, number)  # the last parts are padded
    start, part = compat.master_fragment(parameter, None) or (0, torch.empty(0))
    return start, start + part.numel()


def own_part(parameter: Any, key: str | None = None) -> tuple[int, Tensor]:
    """Return the index of this rank's first element of a parameter, and this rank's elements, of shape (n,).

    The elements are those of the optimizer state `key`. Without a key, they are those of the master; in stage 3, a
    parameter without a master gives its own.
    """
    start, stop = own_range(parameter)
    if not compat.is_divided(parameter):
        _, part = compat.master_fragment(parameter, key) or (0, torch.empty(0))
    elif not compat.has_master(parameter):
        part = compat.divided_part(parameter)
    else:
        from deepspeed import utils

        with as_trained(parameter):
            part = (
                utils.safe_get_local_fp32_param(parameter)
                if key is None
                else utils.safe_get_local_optimizer_state(parameter, key)
            )
    return start, part.detach()[: stop - start]


def write_own_part(parameter: Any, start: int, elements: Tensor, key: str | None = None) -> None:
    """Copy this rank's elements into its partition of a parameter's master or optimizer state."""
    own_start, own_stop = own_range(parameter)
    own_number = own_stop - own_start
    if (start, elements.numel()) != (own_start, own_number) and elements.numel() + own_number:
        raise ValueError(
            f"elements {start} to {start + elements.numel()} of a parameter of shape "
            f"{tuple(compat.full_shape(parameter))}, of which this rank holds {own_start} to {own_stop}: they were "
            "read for another division"
        )
    if not compat.is_divided(parameter):
        if (fragment := compat.master_fragment(parameter, key)) is not None:
            fragment[1].detach().copy_(elements)
        return
    from deepspeed import utils

    # DeepSpeed's own function for full tensors fails if ranks do not divide them evenly.
    padded = torch.zeros(compat.part_size(parameter), device=elements.device)
    padded[: elements.numel()] = elements
    with as_trained(parameter):
        if key is None:
            utils.safe_set_local_fp32_param(parameter, padded)
        else:
            utils.safe_set_local_optimizer_state(parameter, padded, key)


def write_whole(parameter: Any, value: Tensor, key: str | None = None) -> None:
    """Copy this rank's part of a full tensor into a parameter's master, or into its optimizer state `key`."""
    if compat.has_master(parameter):
        start, stop = own_range(parameter)
        write_own_part(parameter, start, value.flatten()[start:stop].to(parameter.device), key)


def whole_of_parts(value: Any, parameter: Any) -> Tensor:
    """Return the full fp32 tensor, gathered from all ranks' ranges of elements. Called on all ranks."""
    start, elements = value.flat_range()
    own = torch.zeros(value.shape, device=parameter.device).flatten()
    own[start : start + elements.numel()] = elements
    # As bits, each of which comes from one rank: a sum of floats would lose the sign of a zero.
    dist.all_reduce(own.view(torch.int32), group=compat.group_of(parameter))
    return own.view(value.shape)
