"""What was gathered, without what padding and replays added: each sample once, in the dataset's order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain_data._nested import map_tensors
from drivetrain_data.partition import BatchPlan


def trim(gathered: Any, plan: BatchPlan) -> Any:
    """Keep the real samples of what all shards computed from a batch.

    Args:
        gathered: Nested tensors, concatenated shard by shard: (all shards' samples, ...), or (shards,) of a value of
            shape () from each, of which those of shards with no sample of their own are left out.
        plan: What is known of the batch.

    Returns:
        The same structure. A tensor of any other first size comes back whole.
    """
    if plan.even:
        return gathered
    return map_tensors(lambda tensor: _trimmed(tensor, plan), gathered)


def trim_objects(by_shard: Sequence[Sequence[Any]], plan: BatchPlan) -> list[Any]:
    """Keep the real samples of lists that shards made of a batch, one object a sample.

    Args:
        by_shard: A list for each shard.
        plan: What is known of the batch.

    Returns:
        One list, in the dataset's order. A shard's list of another length than its batch is kept whole, unless the
        shard has no sample of its own.
    """
    kept: list[Any] = []
    for index, objects in enumerate(by_shard):
        real = plan.real[index]
        of_batch = plan.sizes is not None and len(objects) == plan.sizes[index]
        kept.extend(objects[:real] if of_batch or real == 0 else objects)
    return kept


def _trimmed(tensor: Tensor, plan: BatchPlan) -> Tensor:
    shards = len(plan.real)
    if (
        plan.sizes is not None
        and tensor.shape[0] == sum(plan.sizes)
        and (tensor.ndim > 1 or plan.sizes != (1,) * shards)
    ):
        starts = [sum(plan.sizes[:i]) for i in range(shards)]
        return torch.cat(
            [tensor[start : start + real] for start, real in zip(starts, plan.real, strict=True)]
        )
    if tensor.shape[0] % shards == 0:
        rows = tensor.view(shards, tensor.shape[0] // shards, *tensor.shape[1:])
        own = [i for i in range(shards) if plan.real[i]]
        return rows[own].flatten(0, 1)
    return tensor
