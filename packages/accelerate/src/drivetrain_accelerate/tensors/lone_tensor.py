"""Hand a tensor that one rank has to all ranks, which need not know its shape or dtype."""

import torch

from drivetrain_accelerate.states.shared_context import current_context
from drivetrain_accelerate.tensors.verification import without_check
from drivetrain_state import Context
from drivetrain_state.collectives import operations

TENSOR_TYPE_TO_INT = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Return the shape and the dtype of a tensor that one rank has. Called on all ranks.

    Args:
        tensor: The tensor on the rank that has it, and None on the others.

    Returns:
        The shape, as an int32 tensor of shape (dimensions, 1), and the dtype by its number in `TENSOR_TYPE_TO_INT`.

    Raises:
        ValueError: No rank has a tensor, or several have.
    """
    _, shape, dtype = _only_one(current_context(), tensor)
    return torch.tensor(shape, dtype=torch.int32).view(-1, 1), TENSOR_TYPE_TO_INT[dtype]


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return, on each rank's device, the tensor that one rank has. Called on all ranks.

    Args:
        tensor: The tensor on the rank that has it, and None on the others.

    Raises:
        ValueError: No rank has a tensor, or several have.
    """
    context = current_context()
    source, shape, dtype = _only_one(context, tensor)
    if tensor is not None:
        own = tensor.detach().to(context.device)
    else:
        own = torch.empty(shape, dtype=dtype, device=context.device)
    return operations.broadcast(without_check(context), own, src=source)


def _only_one(context: Context, tensor: torch.Tensor | None) -> tuple[int, torch.Size, torch.dtype]:
    """Return the rank that has a tensor, with its shape and dtype."""
    mine = None if tensor is None else (tensor.shape, tensor.dtype)
    by_rank = operations.gather_object(context, mine)
    having = [(rank, *said) for rank, said in enumerate(by_rank) if said is not None]
    if len(having) != 1:
        ranks = ", ".join(str(rank) for rank, *_ in having) or "none"
        raise ValueError(f"one rank must have the tensor and the others None; ranks that have one: {ranks}")
    return having[0]
