"""Pad nested tensors to the largest size over ranks."""

from typing import Any
from warnings import warn

import torch

from drivetrain_accelerate.compat import map_nested
from drivetrain_accelerate.states.shared_context import current_context
from drivetrain_accelerate.strictness import is_strict
from drivetrain_accelerate.tensors.nested_tensors import leaves, recursively_apply
from drivetrain_accelerate.tensors.verification import check_same_call, without_check
from drivetrain_state.collectives import operations


class CannotPadNestedTensorWarning(UserWarning):
    """A tensor of torch's nested kind, which has no one size, was left as it is."""


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad tensors in one dimension to the largest size on any rank; dtypes are kept. Called on all ranks.

    Args:
        tensor: Lists, tuples and mappings of tensors, nested; a tensor without this dimension stays as it is.
        dim: The dimension; a negative one counts from the last.
        pad_index: The value to pad with.
        pad_first: Whether to pad before the data instead of after it.

    Raises:
        TypeError: A leaf is no tensor.
        ValueError: A tensor of whole numbers is to be padded with a fraction.
        DistributedOperationException: Structures, dtypes or numbers of dimensions differ between ranks.
    """
    context = current_context()
    recursively_apply(_check_paddable, tensor, pad_index, error_on_other_type=True)
    if context.topology.world_size == 1:
        return tensor
    if any(leaf.is_nested for leaf in leaves(tensor)):
        return _around_nested(tensor, dim, pad_index, pad_first)
    check_same_call(context, f"pad_across_processes(dim={dim})", tensor, sizes_differ=True)
    plain = without_check(context)
    if any(leaf.dtype == torch.bool for leaf in leaves(tensor)) and not is_strict():
        integers = recursively_apply(torch.Tensor.long, tensor, test_type=_is_bool)
        padded = operations.pad_across_processes(plain, integers, dim, pad_index, pad_first)
        return map_nested(_own_if_whole, tensor, padded)
    return operations.pad_across_processes(plain, tensor, dim, pad_index, pad_first)


def _is_bool(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool


def _own_if_whole(own: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """Return booleans as they were on a rank that had nothing to pad, as Accelerate leaves them."""
    return own if own.dtype == torch.bool and own.shape == padded.shape else padded


def _check_paddable(leaf: torch.Tensor, pad_index: float) -> torch.Tensor:
    if leaf.is_nested:
        warn(
            "a tensor of torch's nested kind has no one size to pad to: it is left as it is",
            CannotPadNestedTensorWarning,
            stacklevel=6,
        )
    elif not leaf.is_floating_point() and not leaf.is_complex() and pad_index != int(pad_index):
        raise ValueError(
            f"pad_index={pad_index!r} for a tensor of {leaf.dtype}: pad with a whole number, or convert it"
        )
    return leaf


def _around_nested(tensor: Any, dim: int, pad_index: float, pad_first: bool) -> Any:
    plain = [leaf for leaf in leaves(tensor) if not leaf.is_nested]
    padded = iter(pad_across_processes(plain, dim, pad_index, pad_first))

    def filled(leaf: torch.Tensor) -> torch.Tensor:
        return leaf if leaf.is_nested else next(padded)

    return recursively_apply(filled, tensor)
