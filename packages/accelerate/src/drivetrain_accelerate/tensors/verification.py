"""Compare what the ranks hand to a collective before it runs: sizes that differ hang it, or give wrong values."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from drivetrain_accelerate.states.partial_state import current_context
from drivetrain_accelerate.tensors.nested_tensors import list_tensors
from drivetrain_state import CollectiveMismatchError, Context
from drivetrain_state.collectives import operations
from drivetrain_state.collectives.agreement import CollectiveCall, describe_call


class DistributedOperationException(CollectiveMismatchError):  # noqa: N818 the name is Accelerate's
    """The ranks call different collectives, or one with data of different structures, dtypes or shapes."""


def check_same_call(context: Context, operation: str, data: Any, *, sizes_differ: bool = False) -> None:
    """Compare the calls of all ranks by a hash, at the price of one collective of 16 bytes. Called on all ranks.

    Raises:
        DistributedOperationException: On all ranks, if the calls differ; the message shows each rank's.
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
    """Return the context for a collective whose calls were compared already."""
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
    """Decorate a function that calls collectives so that their errors name it too."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            operation = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(f"in {operation}: {error}") from error

    return wrapper
