"""Collectives over nested data: one communication call per dtype, whatever the number of tensors.

`gather`, `reduce` and `broadcast` require the same structure and shapes on all ranks and exchange no metadata;
`gather(uneven=True)`, `gather_rows` and `pad_across_processes` first exchange the shapes. With
`StateSettings(debug=True)` the ranks compare every call before it runs. In a single process the data is returned
unchanged. Gradients do not flow through these functions.

`over` is a view of the mesh: all ranks call, and each communicates with the ranks of its own view.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from typing import Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_state.collectives.agreement import check_agreement
from drivetrain_state.collectives.buckets import (
    Bucket,
    as_bytes,
    cut,
    map_buckets,
    pack,
    stacked,
    unpack,
    unpack_rows,
)
from drivetrain_state.collectives.nested import Data, leaves_with_paths, rebuild, tensors_in
from drivetrain_state.context import Context
from drivetrain_state.errors import CollectiveMismatchError
from drivetrain_state.hang.progress_record import ProgressMark
from drivetrain_state.mesh import View
from drivetrain_state.rank_group import RankGroup

ReduceOp = Literal["sum", "mean", "max", "min"]
Value = TypeVar("Value")

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# The dtypes that gloo or NCCL lacks -> the one to reduce in, which both have and the result fits.
_STAGING_DTYPES = {
    torch.bool: torch.uint8,
    **dict.fromkeys((torch.int16, torch.uint16), torch.int32),
    **dict.fromkeys((torch.uint32, torch.uint64), torch.int64),
}


@torch.no_grad()
def gather(context: Context, data: Data, *, uneven: bool = False, over: View = "world") -> Data:
    """Gather every rank's tensors, concatenated along their first dimension in rank order.

    Must be called on all ranks, with the same structure, dtypes and shapes; with `uneven`, the first sizes may differ
    between ranks, at the cost of one more collective. A tensor of shape (n, ...) is returned as
    (world_size * n, ...), one of shape () as (world_size,).

    Raises:
        LeafError: If `data` holds a leaf that is not a dense tensor.
        CollectiveMismatchError: In debug mode, if the ranks' calls differ; with `uneven`, if a size other than the
            first differs.
    """
    if uneven:
        return gather_rows(context, data, over=over)[0]
    check_agreement(context, "gather(uneven=False)", data, over=over)
    tensors, ranks = tensors_in(data), context.ranks(over)
    if ranks.size == 1:
        return rebuild(data, (tensor.detach().reshape(stacked(tensor.shape, 1)) for tensor in tensors))
    context.progress.mark(ProgressMark.GATHER)
    gathered = rebuild(data, map_buckets(tensors, lambda bucket: _gather_even(ranks, tensors, bucket)))
    context.progress.mark(ProgressMark.GATHER_DONE)
    return gathered


@torch.no_grad()
def gather_rows(context: Context, data: Data, *, over: View = "world") -> tuple[Data, Data]:
    """Gather every rank's tensors, whose first sizes may differ, and count the rows of each rank.

    Called on all ranks, with the same structure and dtypes. Returns the tensors as from `gather`, and the same
    structure with the rows per rank of each tensor: CPU tensors of shape (world_size,).
    """
    check_agreement(context, "gather(uneven=True)", data, free_dim=0, over=over)
    tensors, ranks = tensors_in(data), context.ranks(over)
    if ranks.size == 1 or not tensors:
        single = [tensor.detach().reshape(stacked(tensor.shape, 1)) for tensor in tensors]
        counts = [torch.tensor([tensor.shape[0]]) for tensor in single]
        return rebuild(data, iter(single)), rebuild(data, iter(counts))
    context.progress.mark(ProgressMark.GATHER)
    shapes = _gather_shapes(context, ranks, tensors)
    if all(of_rank == shapes[0] for of_rank in shapes):
        results = map_buckets(tensors, lambda bucket: _gather_even(ranks, tensors, bucket))
    else:
        for position, (path, _) in enumerate(leaves_with_paths(data)):
            of_leaf = [of_rank[position] for of_rank in shapes]
            if any(shape[1:] != of_leaf[0][1:] for shape in of_leaf):
                by_rank = zip(ranks.ranks, of_leaf, strict=True)
                shown = "; ".join(f"rank {rank}: {tuple(shape)}" for rank, shape in by_rank)
                raise CollectiveMismatchError(
                    f"gather: only the first size of data{path} may differ between ranks, but it has {shown}"
                    ". Use pad_across_processes on the other dimension first"
                )
        results = map_buckets(tensors, lambda bucket: _gather_uneven(ranks, tensors, bucket, shapes))
    gathered = rebuild(data, results)
    context.progress.mark(ProgressMark.GATHER_DONE)
    by_tensor = zip(*shapes, strict=True)
    return gathered, rebuild(data, (torch.tensor([shape[0] for shape in shapes]) for shapes in by_tensor))


def _gather_even(ranks: RankGroup, tensors: Sequence[Tensor], bucket: Bucket) -> Iterator[Tensor]:
    return unpack_rows(_all_gather_rows(ranks, pack(tensors, bucket)), tensors, bucket)


def _gather_uneven(
    ranks: RankGroup, tensors: Sequence[Tensor], bucket: Bucket, shapes: list[list[list[int]]]
) -> list[Tensor]:
    asked = list(chain.from_iterable(bucket))
    # Shapes, and so the runs of a bucket, differ between ranks: sorted positions do not.
    positions = sorted(asked)
    by_rank = [[of_rank[position] for position in positions] for of_rank in shapes]
    longest = max(sum(prod(shape) for shape in of_rank) for of_rank in by_rank)
    mine = torch.cat([tensors[position].reshape(-1) for position in positions])
    rows = _all_gather_rows(ranks, torch.cat([mine, mine.new_zeros(longest - mine.numel())]))
    pieces = [cut(row, of_rank) for row, of_rank in zip(rows, by_rank, strict=True)]
    whole = dict(zip(positions, map(torch.cat, zip(*pieces, strict=True)), strict=True))
    return [whole[position] for position in asked]


def _all_gather_rows(ranks: RankGroup, mine: Tensor) -> Tensor:
    """Gather every rank's flat buffer as one row: (total,) to (number of ranks, total)."""
    total = mine.numel()
    rows = mine.new_empty(ranks.size * total)  # gloo takes no buffer of two dimensions here
    dist.all_gather_into_tensor(as_bytes(rows), as_bytes(mine), group=ranks.process_group)
    return rows.view(ranks.size, total)


def _gather_shapes(context: Context, ranks: RankGroup, tensors: Sequence[Tensor]) -> list[list[list[int]]]:
    """Return each tensor's shape on each rank, indexed [rank][tensor]; () counts as (1,)."""
    mine = [list(tensor.shape) or [1] for tensor in tensors]
    sizes = torch.tensor([size for shape in mine for size in shape], dtype=torch.int64)
    rows = _all_gather_rows(ranks, sizes.to(_choose_metadata_device(context))).tolist()
    by_rank: list[list[list[int]]] = []
    for row in rows:
        left = iter(cast("list[int]", row))
        by_rank.append([[next(left) for _ in shape] for shape in mine])
    return by_rank


def _choose_metadata_device(context: Context) -> torch.device:
    """Return the device to exchange shapes on: the CPU if the group supports it, to avoid waiting for the device."""
    backends = dist.get_backend_config(context.group)
    return torch.device("cpu") if "cpu:" in backends or backends == "gloo" else context.device


@torch.no_grad()
def reduce(context: Context, data: Data, op: ReduceOp = "sum", *, over: View = "world") -> Data:
    """Reduce tensors elementwise over all ranks to their sum, mean, maximum or minimum, as an all-reduce.

    Must be called on all ranks, with the same structure, dtypes and shapes; other errors are as for `gather`. Results
    keep their dtypes; `"mean"` of float16 and bfloat16 is computed in float32. Results of one dtype share one buffer.

    Raises:
        ValueError: For an unknown `op`, and where the result has no representation in the tensor's dtype: `"mean"`
            of integers, `"sum"` or `"mean"` of booleans, `"max"` or `"min"` of complex numbers.
    """
    if op not in get_args(ReduceOp):
        raise ValueError(f"op={op!r}: say one of {', '.join(get_args(ReduceOp))}")
    check_agreement(context, f"reduce(op={op!r})", data, over=over)
    tensors, ranks = tensors_in(data), context.ranks(over)
    for dtype in (tensor.dtype for tensor in tensors):
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"op='mean' of {dtype}: convert to a float dtype first, or say op='sum'")
        if op == "sum" and dtype == torch.bool:
            raise ValueError(
                "op='sum' of torch.bool: convert to an integer dtype to count, or say op='max' for any"
            )
        if op in ("max", "min") and dtype.is_complex:
            raise ValueError(f"op={op!r} of {dtype}: complex numbers have no order; reduce .abs() instead")
    if ranks.size == 1:
        return rebuild(data, (tensor.detach() for tensor in tensors))

    def reduce_bucket(bucket: Bucket) -> Iterator[Tensor]:
        mine = pack(tensors, bucket)
        staging = _STAGING_DTYPES.get(mine.dtype, mine.dtype)
        if mine.is_floating_point() and (mine.itemsize == 1 or (mine.itemsize == 2 and op == "mean")):
            staging = torch.float32
        staged = mine.to(staging)
        real = torch.view_as_real(staged) if staged.is_complex() else staged
        dist.all_reduce(real, _TORCH_OPS[op], group=ranks.process_group)
        if op == "mean":
            staged /= ranks.size
        return unpack(staged.to(mine.dtype), tensors, bucket)

    context.progress.mark(ProgressMark.REDUCE)
    reduced = rebuild(data, map_buckets(tensors, reduce_bucket))
    context.progress.mark(ProgressMark.REDUCE_DONE)
    return reduced


@torch.no_grad()
def broadcast(context: Context, data: Data, src: int = 0, *, over: View = "world") -> Data:
    """Return the tensors of rank `src` of the view on every rank; ValueError if there is no such rank.

    Must be called on all ranks, with the same structure, dtypes and shapes; other errors are as for `gather`.
    """
    tensors, ranks = tensors_in(data), context.ranks(over)
    check_rank(context, src, over=over)
    check_agreement(context, f"broadcast(src={src})", data, over=over)
    if ranks.size == 1:
        return rebuild(data, (tensor.detach() for tensor in tensors))

    def broadcast_bucket(bucket: Bucket) -> Iterator[Tensor]:
        buffer = pack(tensors, bucket)
        dist.broadcast(as_bytes(buffer), group_src=src, group=ranks.process_group)
        return unpack(buffer, tensors, bucket)

    context.progress.mark(ProgressMark.BROADCAST)
    received = rebuild(data, map_buckets(tensors, broadcast_bucket))
    context.progress.mark(ProgressMark.BROADCAST_DONE)
    return received


@torch.no_grad()
def pad_across_processes(
    context: Context, data: Data, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Data:
    """Pad tensors along `dim` with the value `pad_index` to the largest size on any rank.

    Must be called on all ranks, with the same structure. A negative `dim` counts from the last dimension; tensors
    without `dim` are returned unchanged. The padding follows the data, or precedes it with `pad_first`.
    """
    check_agreement(context, f"pad_across_processes(dim={dim})", data, free_dim=dim)
    tensors = tensors_in(data)
    if context.topology.world_size == 1:
        return data
    context.progress.mark(ProgressMark.PAD)
    mine = torch.tensor(
        [t.shape[dim] if -t.dim() <= dim < t.dim() else 0 for t in tensors], dtype=torch.int64
    )
    longest = (
        _all_gather_rows(context.ranks("world"), mine.to(_choose_metadata_device(context))).amax(0).tolist()
    )
    padded: list[Tensor] = []
    for tensor, size in zip(tensors, cast("list[int]", longest), strict=True):
        if -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] != size:
            shape = list(tensor.shape)
            shape[dim] = size - shape[dim]
            filling = tensor.new_full(shape, pad_index)
            tensor = torch.cat([filling, tensor] if pad_first else [tensor, filling], dim=dim)
        padded.append(tensor)
    context.progress.mark(ProgressMark.PAD_DONE)
    return rebuild(data, iter(padded))


def gather_object(context: Context, value: Value, *, over: View = "world") -> list[Value]:
    """Gather `value` from all ranks into a list, in rank order, by pickling. Must be called on all ranks."""
    ranks = context.ranks(over)
    if ranks.size == 1:
        return [value]
    context.progress.mark(ProgressMark.GATHER_OBJECT)
    check_agreement(context, "gather_object", over=over)
    values: list[Value | None] = [None] * ranks.size
    dist.all_gather_object(values, value, group=ranks.process_group)
    context.progress.mark(ProgressMark.GATHER_OBJECT_DONE)
    return cast("list[Value]", values)


def broadcast_object(context: Context, value: Value, src: int = 0) -> Value:
    """Return the `value` of rank `src` on every rank, by pickling. Must be called on all ranks."""
    check_rank(context, src)
    if context.topology.world_size == 1:
        return value
    context.progress.mark(ProgressMark.BROADCAST_OBJECT)
    check_agreement(context, f"broadcast_object(src={src})")
    values = [value]
    dist.broadcast_object_list(values, src=src, group=context.group)
    context.progress.mark(ProgressMark.BROADCAST_OBJECT_DONE)
    return values[0]


def barrier(context: Context) -> None:
    """Block until all ranks reach this call. Must be called on all ranks."""
    if context.topology.world_size == 1:
        return
    context.progress.mark(ProgressMark.BARRIER)
    check_agreement(context, "barrier")
    on_cuda = context.device.type == "cuda"
    dist.barrier(group=context.group, device_ids=[context.device.index] if on_cuda else None)
    context.progress.mark(ProgressMark.BARRIER_DONE)


def check_rank(context: Context, rank: int, name: str = "src", *, over: View = "world") -> None:
    """Raise ValueError if the view has no rank of this number."""
    size = context.ranks(over).size
    if not 0 <= rank < size:
        among = "world_size" if over == "world" else over
        raise ValueError(f"{name}={rank} with {among}={size}: name a rank that exists")
