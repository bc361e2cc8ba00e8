"""Helpers that read sharded loaders: part of an epoch, after a resume, and on connected ranks."""

from itertools import islice
from typing import Any

import torch.distributed as dist

from drivetrain_data import Shard, ShardedLoader, shard_loader


def samples_of(loader: Any, num_steps: int | None = None) -> list[int]:
    """Read the samples of `num_steps` batches and leave the loop, or of all batches by default."""
    return [int(sample) for batch in islice(loader, num_steps) for sample in batch]


def resumed(loader: Any, begun: Any) -> Any:
    """Give `loader` the position of `begun`."""
    loader.load_state_dict(begun.state_dict())
    return loader


def shard_over_ranks(loader: Any, **options: Any) -> ShardedLoader[Any]:
    """Shard a loader over all ranks of the default group; called on all ranks."""
    shard = Shard(dist.get_rank(), dist.get_world_size())
    return shard_loader(loader, shard, group=dist.group.WORLD, **options)
