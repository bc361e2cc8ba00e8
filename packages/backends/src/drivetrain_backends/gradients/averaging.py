"""Gradients of whole parameters, averaged over ranks after backward."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


@torch.no_grad()
def average(
    parameters: Sequence[nn.Parameter],
    device: torch.device,
    *,
    group: ProcessGroup | None = None,
    bucket_bytes: float = float("inf"),
) -> None:
    """Average the gradients of whole parameters over all ranks. Called on all ranks, with the same parameters.

    A parameter that has a gradient on some ranks counts as zero on the others; one that has none on any rank gets
    none. Gradients of half precision are added up in fp32, and sparse ones as dense ones. Nothing waits for the
    device unless a parameter has no gradient on this rank.

    Args:
        parameters: The parameters, each once.
        device: Where the ranks talk.
        group: The ranks; all by default.
        bucket_bytes: How much is sent in one exchange, about; several are under way at a time.
    """
    world_size = dist.get_world_size(group)
    sent: list[tuple[list[nn.Parameter], Tensor, dist.Work | None]] = []
    for bucket in _buckets(parameters, bucket_bytes):
        flat = _packed(bucket, device)
        sent.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in sent:
        if work is not None:
            work.wait()
        _unpack(bucket, flat, world_size)


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Cut parameters into runs of one dtype, in the order given, each of about so many bytes."""
    full: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    sizes: defaultdict[torch.dtype, int] = defaultdict(int)
    for parameter in parameters:
        filling.setdefault(parameter.dtype, []).append(parameter)
        sizes[parameter.dtype] += parameter.numel() * parameter.element_size()
        if sizes[parameter.dtype] >= bucket_bytes:
            full.append(filling.pop(parameter.dtype))
            sizes[parameter.dtype] = 0
    return full + list(filling.values())


def _packed(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """Put gradients into one tensor, after a number for each that says whether this rank has it."""
    wide = torch.promote_types(parameters[0].dtype, torch.float32)
    has = torch.tensor([float(p.grad is not None) for p in parameters], dtype=wide)
    values = [torch.zeros_like(p) if p.grad is None else _dense(p.grad) for p in parameters]
    # CUDA has copied pageable memory to its own when the call returns, so `has` may go.
    return torch.cat(
        [has.to(device, non_blocking=True), *(value.reshape(-1).to(device, wide) for value in values)]
    )


def _unpack(parameters: Sequence[nn.Parameter], flat: Tensor, world_size: int) -> None:
    """Divide the sums, and put them where the gradients were."""
    number = len(parameters)
    # Where no gradient is missing here, some rank has each, and nobody need ask the device.
    is_missing = any(p.grad is None for p in parameters)
    numbers: list[complex] = flat[:number].tolist() if is_missing else [1.0] * number
    flat[number:].div_(world_size)
    means = flat[number:].split([p.numel() for p in parameters])
    for parameter, ranks, mean in zip(parameters, numbers, means, strict=True):
        shaped = mean.view(parameter.shape)
        if parameter.grad is None:
            if ranks != 0:
                parameter.grad = torch.empty_like(parameter).copy_(shaped)
        elif parameter.grad.is_sparse:
            dims = parameter.grad.sparse_dim()
            parameter.grad = shaped.to(parameter.device, parameter.dtype).to_sparse(dims)
        else:
            parameter.grad.copy_(shaped)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
