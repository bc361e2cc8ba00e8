"""Split the tensors of one rank among all ranks; the rank sends structure and shapes too."""

from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_state.collectives.agreement import check_agreement
from drivetrain_state.collectives.buckets import Bucket, as_bytes, map_buckets, pack, unpack
from drivetrain_state.collectives.nested import Data, Nested, rebuild, tensors_in
from drivetrain_state.collectives.operations import broadcast_object, check_rank
from drivetrain_state.context import Context
from drivetrain_state.hang.progress_record import ProgressMark


@torch.no_grad()
def scatter(context: Context, data: Data | None, src: int = 0) -> Data:
    """Split the tensors of rank `src` among all ranks: the inverse of `gather`. Must be called on all ranks.

    Each rank gets (n, ...) of a tensor of shape (world_size * n, ...), in rank order, on its `context.device`.
    Structure and shapes are broadcast first, so the other ranks pass None.

    Raises:
        ValueError: On all ranks, if a first size is not divisible by the world size, or `src` passes None.
        LeafError: On all ranks, if `data` holds a leaf that is not a dense tensor.
    """
    check_rank(context, src)
    if context.topology.world_size == 1:
        return rebuild(cast("Data", data), (tensor.detach() for tensor in tensors_in(data)))
    context.progress.mark(ProgressMark.SCATTER)
    check_agreement(context, f"scatter(src={src})")
    is_source = context.topology.rank == src
    plan = _plan_scatter(data, context.topology.world_size) if is_source else None
    plan = broadcast_object(context, plan, src)
    if isinstance(plan, Exception):
        raise plan
    whole = tensors_in(data) if is_source else None
    parts = tensors_in(plan)

    def scatter_bucket(bucket: Bucket) -> Iterator[Tensor]:
        total = sum(parts[position].numel() for run in bucket for position in run)
        mine = torch.empty(total, dtype=parts[bucket[0][0]].dtype, device=context.device)
        rows = None
        if whole is not None:
            shares = [tensor.to(context.device).tensor_split(context.topology.world_size) for tensor in whole]
            rows = [as_bytes(pack(of_rank, bucket)) for of_rank in zip(*shares, strict=True)]
        dist.scatter(as_bytes(mine), rows, src=src, group=context.group)
        return unpack(mine, parts, bucket)

    received = rebuild(cast("Data", plan), map_buckets(parts, scatter_bucket))
    context.progress.mark(ProgressMark.SCATTER_DONE)
    return received


def _plan_scatter(data: Nested, world_size: int) -> Nested | Exception:
    """Return `data` with meta tensors in the shape of one rank's part, or the error to raise on all ranks."""
    try:
        tensors = tensors_in(data)
    except ValueError as error:
        return error
    if data is None:
        return ValueError("scatter: the source rank passed None; it must pass the data, the others None")
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] % world_size:
            return ValueError(
                f"scatter: a tensor of shape {tuple(tensor.shape)} cannot be divided among world_size={world_size} "
                "ranks: its first size must be a multiple of it"
            )
    return rebuild(data, (tensor.to("meta").tensor_split(world_size)[0] for tensor in tensors))
