"""All-reduce of the gradients of full parameters after backward."""

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
    dtype: torch.dtype | None = None,
) -> None:
    """Average the gradients of full parameters over all ranks. Called on all ranks, with the same parameters.

    If only some ranks have a parameter's gradient, it counts as zero on the others; without any, it stays None.
    Sparse gradients are summed as dense gradients. The device is synchronised only if a parameter has no gradient on
    this rank.

    One all-reduce sends about `bucket_bytes`; several run at a time. The sums are in `dtype`. None sums in the dtype
    of the gradients, or in fp32 if that is a half precision.
    """
    world_size = dist.get_world_size(group)
    sent: list[tuple[list[nn.Parameter], Tensor, dist.Work | None]] = []
    for bucket in _buckets(parameters, bucket_bytes):
        flat = _pack(bucket, device, dtype)
        sent.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in sent:
        if work is not None:
            work.wait()
        _unpack(bucket, flat, world_size)


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets of one dtype and about `bucket_bytes` each, in the given order."""
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


def _pack(parameters: Sequence[nn.Parameter], device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Return a flat tensor: for each parameter a flag, 1 if this rank has its gradient, then all gradients."""
    wide = torch.promote_types(parameters[0].dtype, torch.float32) if dtype is None else dtype
    if parameters[0].is_complex():  # of which a real dtype would drop a part
        wide = torch.promote_types(wide, torch.complex64)
    has = torch.tensor([float(p.grad is not None) for p in parameters], dtype=wide)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    values = [one.to_dense() if one.is_sparse else one for one in gradients]
    # `has` may be freed: CUDA has staged pageable memory by the time the call returns.
    return torch.cat(
        [has.to(device, non_blocking=True), *(value.reshape(-1).to(device, wide) for value in values)]
    )


def _unpack(parameters: Sequence[nn.Parameter], flat: Tensor, world_size: int) -> None:
    """Divide the sums by `world_size` and write them back to the gradients."""
    number = len(parameters)
    # A gradient that this rank has needs no flag, and reading the flags would synchronise with the device.
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
