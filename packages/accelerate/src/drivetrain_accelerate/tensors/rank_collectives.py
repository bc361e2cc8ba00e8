"""Exchange nested tensors and objects between ranks, in Accelerate's forms, over drivetrain's collectives."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from hashlib import blake2b
from logging import getLogger
from typing import Any, cast
from warnings import warn

import torch
import torch.distributed as dist
from torch import nn

from drivetrain_accelerate.compat import map_nested
from drivetrain_accelerate.states.partial_state import current_context
from drivetrain_accelerate.strictness import is_strict
from drivetrain_accelerate.tensors.nested_tensors import list_tensors, recursively_apply
from drivetrain_state import CollectiveMismatchError, Context, LeafError, RankLogger, barrier
from drivetrain_state.collectives import operations
from drivetrain_state.collectives.agreement import CollectiveCall, describe_call
from drivetrain_state.collectives.nested import rebuild, tensors_in

logger = RankLogger(getLogger(__name__))

_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
TENSOR_INT_TO_DTYPE = dict(enumerate((*_FLOATING, *_WHOLE), start=1))
TENSOR_TYPE_TO_INT = {dtype: number for number, dtype in TENSOR_INT_TO_DTYPE.items()}

_OPERATIONS = ("mean", "sum", "max", "min", "none")
_REDUCED_BY_ACCELERATE = ("mean", "sum", "max")  # it sums for any other word


def wait_for_everyone() -> None:
    """Wait until every rank has reached this call. Called on all ranks."""
    barrier(current_context())


def gather(tensor: Any) -> Any:
    """Concatenate nested tensors over ranks, in dimension 0 and rank order. Called on all ranks.

    On several ranks, a leaf that is no tensor raises a TypeError. Structures, dtypes or shapes that differ between
    ranks raise a DistributedOperationException.
    """
    context = current_context()
    if context.topology.world_size == 1:
        return tensor
    return _run_compared(context, "gather", operations.gather, tensor)


def gather_object(object: Any) -> Any:
    """Join the ranks' lists of objects into one list, by pickling. Called on all ranks.

    Tensors on an accelerator arrive on the accelerator of the rank that receives them.
    """
    context = current_context()
    if context.topology.world_size == 1:
        return object
    by_rank = operations.gather_object(context, recursively_apply(_OnAccelerator, object, test_type=_is_far))
    for of_rank in by_rank if is_strict() else ():
        if not hasattr(of_rank, "__iter__") or isinstance(of_rank, (str, bytes, Mapping, _OnAccelerator)):
            raise TypeError(
                f"gather_object of a {type(of_rank).__name__}: give it a list, [x] for one object of each rank"
            )
    joined = [item for of_rank in by_rank for item in of_rank]
    return recursively_apply(_OnAccelerator.arrive, joined, context.device, test_type=_is_sent)


@dataclass(frozen=True)
class _OnAccelerator:
    """An accelerator's tensor, pickled from the CPU so that unpickling takes no memory of the sender's device."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor", self.tensor.detach().cpu())

    def arrive(self, device: torch.device) -> torch.Tensor:
        return self.tensor.to(device)


def _is_far(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta")


def _is_sent(leaf: Any) -> bool:
    return isinstance(leaf, _OnAccelerator)


@torch.no_grad()
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Copy one rank's nested tensors into the tensors of all ranks, in place, and return them. Called on all ranks.

    Structures, dtypes or shapes that differ between ranks raise a DistributedOperationException.
    """
    context = current_context()
    if context.topology.world_size == 1:
        return tensor
    operations.check_rank(context, from_process)
    send = partial(operations.broadcast, src=from_process)
    values = _run_compared(context, f"broadcast(from_process={from_process})", send, tensor)
    if context.topology.rank != from_process:
        for own, value in zip(tensors_in(tensor), tensors_in(values), strict=True):
            own.copy_(value)
    return tensor


def broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
    """Fill a list with the objects of one rank's list, in place, and return it. Called on all ranks."""
    context = current_context()
    if context.topology.world_size == 1:
        return object_list
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list fills a list, and got a {type(object_list).__name__}")
    sent = recursively_apply(_OnAccelerator, object_list, test_type=_is_far)
    received = operations.broadcast_object(context, cast("list[Any]", sent), src=from_process)
    if context.topology.rank != from_process:
        object_list[:] = recursively_apply(
            _OnAccelerator.arrive, received, context.device, test_type=_is_sent
        )
    return cast("list[Any]", object_list)


def reduce(tensor: Any, reduction: str | None = "mean", scale: float = 1.0) -> Any:
    """Reduce nested tensors over ranks, elementwise. `scale` has an effect on XLA alone. Called on all ranks.

    A ValueError refuses an unknown reduction and, on several ranks, the mean of integers. Structures, dtypes or
    shapes that differ between ranks raise a DistributedOperationException.
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
    run = partial(_reduce, reduction=reduction)
    return _run_compared(context, f"reduce(reduction={reduction!r})", run, tensor)


def _reduce(context: Context, data: Any, *, reduction: Any) -> Any:
    """Return the reduced data. The sum of booleans is true if any rank's value is true."""
    own = tensors_in(data)
    if reduction != "sum" or all(each.dtype != torch.bool for each in own):
        return operations.reduce(context, data, op=reduction)
    counted = rebuild(data, iter([each.int() if each.dtype == torch.bool else each for each in own]))
    pairs = zip(tensors_in(operations.reduce(context, counted)), own, strict=True)
    return rebuild(data, (total.bool() if each.dtype == torch.bool else total for total, each in pairs))


def _run_compared(context: Context, call: str, operation: Callable[[Context, Any], Any], tensor: Any) -> Any:
    """Compare the ranks' calls of a collective, then run it without a second comparison."""
    check_same_call(context, call, tensor)
    try:
        return operation(without_check(context), tensor)
    except LeafError as error:
        raise TypeError(str(error)) from error


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor of torch was not padded, since it has no single size."""


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad tensors in one dimension to the largest size on any rank; dtypes are kept. Called on all ranks.

    A ValueError refuses to pad integers with a fraction. Structures, dtypes or numbers of dimensions that differ
    between ranks raise a DistributedOperationException.
    """
    context = current_context()
    recursively_apply(_check_paddable, tensor, pad_index, error_on_other_type=True)
    tensors = list_tensors(tensor)
    has_nested = any(leaf.is_nested for leaf in tensors)
    if has_nested:
        warn(
            "a tensor of torch's nested kind has no one size to pad to: it is left as it is",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
    if context.topology.world_size == 1:
        return tensor
    if has_nested:
        plain = [leaf for leaf in tensors if not leaf.is_nested]
        padded = iter(pad_across_processes(plain, dim, pad_index, pad_first))

        def take_padded(leaf: torch.Tensor) -> torch.Tensor:
            return leaf if leaf.is_nested else next(padded)

        return recursively_apply(take_padded, tensor)
    check_same_call(context, f"pad_across_processes(dim={dim})", tensor, sizes_differ=True)
    options = {"dim": dim, "pad_index": pad_index, "pad_first": pad_first}
    pad = partial(operations.pad_across_processes, without_check(context), **options)
    if any(leaf.dtype == torch.bool for leaf in tensors) and not is_strict():

        def restore(own: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
            # Accelerate leaves booleans as they were on a rank that had nothing to pad.
            return own if own.dtype == torch.bool and own.shape == padded.shape else padded

        numbers = recursively_apply(
            torch.Tensor.long, tensor, test_type=lambda leaf: leaf.dtype == torch.bool
        )
        return map_nested(restore, tensor, pad(numbers))
    return pad(tensor)


def _check_paddable(leaf: torch.Tensor, pad_index: float) -> torch.Tensor:
    is_whole = not leaf.is_nested and not leaf.is_floating_point() and not leaf.is_complex()
    if is_whole and pad_index != int(pad_index):
        raise ValueError(
            f"pad_index={pad_index!r} for a tensor of {leaf.dtype}: pad with a whole number, or convert it"
        )
    return leaf


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Return the shape and dtype of one rank's tensor; the other ranks pass None. Called on all ranks.

    The shape is an int32 tensor of shape (dimensions, 1), the dtype its number in `TENSOR_TYPE_TO_INT`.
    """
    _, shape, dtype = _only_one(current_context(), tensor)
    return torch.tensor(shape, dtype=torch.int32).view(-1, 1), TENSOR_TYPE_TO_INT[dtype]


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copy one rank's tensor to every rank's device; the other ranks pass None. Called on all ranks."""
    context = current_context()
    source, shape, dtype = _only_one(context, tensor)
    own = torch.empty(shape, dtype=dtype, device=context.device) if tensor is None else tensor.detach()
    return operations.broadcast(without_check(context), own.to(context.device), src=source)


def _only_one(context: Context, tensor: torch.Tensor | None) -> tuple[int, torch.Size, torch.dtype]:
    """Return the rank that has a tensor, the shape and the dtype; raise a ValueError for no or several such ranks."""
    mine = None if tensor is None else (tensor.shape, tensor.dtype)
    by_rank = operations.gather_object(context, mine)
    having = [(rank, *said) for rank, said in enumerate(by_rank) if said is not None]
    if len(having) != 1:
        ranks = ", ".join(str(rank) for rank, *_ in having) or "none"
        raise ValueError(f"one rank must have the tensor and the others None; ranks that have one: {ranks}")
    return having[0]


@contextmanager
def GatheredParameters(  # noqa: N802 Accelerate's name
    params: Iterable[torch.Tensor] | torch.Tensor,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Generator[Any]:
    """Run the block with whole parameters if DeepSpeed's ZeRO stage 3 has divided them. Called on all ranks."""
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    if not enabled or not any(hasattr(each, "ds_id") for each in given):  # ZeRO marks what it divides
        yield
        return
    import deepspeed

    zero: Any = deepspeed.zero
    with zero.GatheredParameters(given, modifier_rank=modifier_rank, fwd_module=fwd_module) as gathered:
        yield gathered


class DistributedOperationException(CollectiveMismatchError):  # noqa: N818 the name is Accelerate's
    """The ranks call different collectives, or the same one with different structures, dtypes or shapes."""


def check_same_call(context: Context, operation: str, data: Any, *, sizes_differ: bool = False) -> None:
    """Compare the calls of all ranks by a hash; this costs one collective of 16 bytes. Called on all ranks.

    If the calls differ, all ranks raise a DistributedOperationException that shows each rank's call.
    """
    if context.topology.world_size == 1:
        return
    mine = describe_call(operation, data)
    if sizes_differ:
        unsized = tuple((path, kind, (-1,) * len(shape)) for path, kind, shape in mine.leaves)
        mine = CollectiveCall(mine.call, unsized)
    digest = blake2b(str(mine).encode(), digest_size=16).digest()
    words = [int.from_bytes(half, "big", signed=True) for half in (digest[:8], digest[8:])]
    plain = without_check(context)
    # A group that serves the CPU does not wait for the accelerator there.
    backends = str(dist.get_backend_config(context.group))
    device = torch.device("cpu") if "cpu:" in backends or backends == "gloo" else context.device
    rows = operations.gather(plain, torch.tensor([words], device=device))
    if bool((rows == rows[0]).all()):
        return
    lines = [f"  rank {rank}: {said}" for rank, said in enumerate(operations.gather_object(plain, str(mine)))]
    raise DistributedOperationException(
        "the ranks do not make the same call:\n"
        + "\n".join(lines)
        + "\nStructures, dtypes and shapes must be equal; use pad_across_processes first where sizes differ"
    )


def without_check(context: Context) -> Context:
    """Return the context without the comparison of calls, for a call that was compared already."""
    return replace(context, settings=replace(context.settings, debug=False))


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a collective so that in debug mode the ranks compare its first argument, `tensor`, before it runs."""
    operation = f"{function.__module__}.{function.__name__}"

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context.settings.debug and context.topology.world_size > 1:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if other := sorted({leaf.device.type for leaf in list_tensors(tensor)} - {context.device.type}):
                raise DistributedOperationException(
                    f"{operation} got a tensor on {other[0]}, while this process computes on {context.device.type}: "
                    "move it there first"
                )
            check_same_call(context, operation, tensor)
        return function(*args, **kwargs)

    return wrapper


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that calls collectives: errors of the collectives name the function too."""

    @contextmanager
    def naming() -> Generator[None]:
        try:
            yield
        except DistributedOperationException as error:
            operation = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(f"in {operation}: {error}") from error

    return naming()(function)
