"""Exchange nested tensors and objects between ranks, in Accelerate's forms, over drivetrain's collectives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any, cast

import torch

from drivetrain_accelerate.states.shared_context import current_context
from drivetrain_accelerate.strictness import is_strict
from drivetrain_accelerate.tensors.nested_tensors import recursively_apply
from drivetrain_accelerate.tensors.verification import check_same_call, without_check
from drivetrain_state import Context, LeafError, RankLogger
from drivetrain_state.collectives import operations
from drivetrain_state.collectives.nested import rebuild, tensors_in

logger = RankLogger(getLogger(__name__))

_OPERATIONS = ("mean", "sum", "max", "min", "none")
_REDUCED_BY_ACCELERATE = ("mean", "sum", "max")  # it sums for any other word


def gather(tensor: Any) -> Any:
    """Concatenate nested tensors over ranks, in dimension 0 and rank order. Called on all ranks.

    Raises:
        TypeError: A leaf is no tensor, where there are several ranks.
        DistributedOperationException: Structures, dtypes or shapes differ between ranks.
    """
    context = current_context()
    if context.topology.world_size == 1:
        return tensor
    check_same_call(context, "gather", tensor)
    return _of_tensors(operations.gather, without_check(context), tensor)


def gather_object(object: Any) -> Any:
    """Join the ranks' lists of any objects to one, by pickling. Called on all ranks.

    Tensors on an accelerator arrive on the accelerator of the rank that receives them.

    Raises:
        TypeError: The object is no list or other iterable of the objects to gather.
    """
    context = current_context()
    if context.topology.world_size == 1:
        return object
    by_rank = operations.gather_object(context, recursively_apply(_OnAccelerator, object, test_type=_is_far))
    strange = [type(of_rank).__name__ for of_rank in by_rank if not _is_listing(of_rank)]
    if strange and is_strict():
        raise TypeError(f"gather_object of a {strange[0]}: give it a list, [x] for one object of each rank")
    return [_arrived(context, item) for of_rank in by_rank for item in of_rank]


@dataclass(frozen=True)
class _OnAccelerator:
    """A tensor of an accelerator on its way: unpickled as it is, it would take memory of the sender's device."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor", self.tensor.detach().cpu())


def _is_far(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta")


def _is_listing(of_rank: Any) -> bool:
    return hasattr(of_rank, "__iter__") and not isinstance(of_rank, (str, bytes, Mapping, _OnAccelerator))


def _arrived(context: Context, item: Any) -> Any:
    def received(sent: _OnAccelerator) -> torch.Tensor:
        return sent.tensor.to(context.device)

    return recursively_apply(received, item, test_type=_is_sent)


def _is_sent(leaf: Any) -> bool:
    return isinstance(leaf, _OnAccelerator)


@torch.no_grad()
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Fill nested tensors with those of one rank, in place, and return them. Called on all ranks.

    Raises:
        ValueError: There is no such rank.
        TypeError: A leaf is no tensor, where there are several ranks.
        DistributedOperationException: Structures, dtypes or shapes differ between ranks.
    """
    context = current_context()
    if context.topology.world_size == 1:
        return tensor
    operations.check_rank(context, from_process)
    check_same_call(context, f"broadcast(from_process={from_process})", tensor)

    def received(plain: Context, data: Any) -> Any:
        return operations.broadcast(plain, data, src=from_process)

    values = _of_tensors(received, without_check(context), tensor)
    if context.topology.rank != from_process:
        _copy_into(tensor, values)
    return tensor


def _copy_into(data: Any, values: Any) -> None:
    """Copy the tensors of one structure into those of another of the same structure."""
    for own, value in zip(tensors_in(data), tensors_in(values), strict=True):
        own.copy_(value)


def broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
    """Fill a list with the objects of one rank's list, in place, and return it. Called on all ranks.

    Raises:
        ValueError: There is no such rank.
        TypeError: It is no list, where there are several ranks.
    """
    context = current_context()
    if context.topology.world_size == 1:
        return object_list
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list fills a list, and got a {type(object_list).__name__}")
    sent = recursively_apply(_OnAccelerator, object_list, test_type=_is_far)
    received = operations.broadcast_object(context, cast("list[Any]", sent), src=from_process)
    if context.topology.rank != from_process:
        object_list[:] = [_arrived(context, item) for item in received]
    return cast("list[Any]", object_list)


def reduce(tensor: Any, reduction: str | None = "mean", scale: float = 1.0) -> Any:
    """Reduce nested tensors over ranks, elementwise. Called on all ranks.

    Args:
        tensor: Lists, tuples and mappings of tensors, nested.
        reduction: "mean", "sum", "max" or "min"; "none" returns this rank's tensors.
        scale: Not applied, with a warning: Accelerate applies it on XLA devices alone.

    Raises:
        ValueError: The reduction is unknown, or the mean is of integers, where there are several ranks.
        TypeError: A leaf is no tensor.
        DistributedOperationException: Structures, dtypes or shapes differ between ranks.
    """
    if reduction not in _REDUCED_BY_ACCELERATE and not is_strict():
        reduction = "sum"
    if (reduction or "none") not in _OPERATIONS:
        raise ValueError(f"reduction={reduction!r}: say one of {', '.join(_OPERATIONS)}")
    context = current_context()
    if scale != 1.0:
        logger.warning("reduce(scale=%s): it is applied on XLA devices alone; multiply the result", scale)
    if context.topology.world_size == 1 or reduction in (None, "none"):
        return recursively_apply(torch.clone, tensor, error_on_other_type=True)
    check_same_call(context, f"reduce(reduction={reduction!r})", tensor)
    return _of_tensors(_reducing(reduction), without_check(context), tensor)


def _reducing(reduction: Any) -> Callable[[Context, Any], Any]:
    """Return the reduction; a sum of booleans, which has no boolean value, is whether any rank's is true."""

    def reduced(context: Context, data: Any) -> Any:
        own = tensors_in(data)
        if reduction != "sum" or all(each.dtype != torch.bool for each in own):
            return operations.reduce(context, data, op=reduction)
        counted = rebuild(data, iter([each.int() if each.dtype == torch.bool else each for each in own]))
        sums = tensors_in(operations.reduce(context, counted))
        pairs = zip(sums, own, strict=True)
        return rebuild(data, (total.bool() if each.dtype == torch.bool else total for total, each in pairs))

    return reduced


def _of_tensors(operation: Callable[[Context, Any], Any], context: Context, tensor: Any) -> Any:
    try:
        return operation(context, tensor)
    except LeafError as error:
        raise TypeError(str(error)) from error
