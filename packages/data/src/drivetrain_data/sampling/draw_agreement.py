"""Check that ranks that draw samples independently have drawn the same ones."""

from collections.abc import Callable
from typing import TypeAlias

import torch.distributed as dist

# A callback that receives a sampler's name and a checksum of the indices it drew.
Agree: TypeAlias = Callable[[str, int], None]


def check_agreement(group: dist.ProcessGroup, name: str, checksum: int) -> None:
    """Check that a sampler drew the same indices on every rank. Called on all ranks of the group.

    Args:
        group: The process group of the ranks that share the data.
        name: The name of the sampler, for the error.
        checksum: The checksum of the indices drawn on this rank.

    Raises:
        ValueError: The sampler drew other indices on another rank; raised on all ranks.
    """
    drawn: list[int | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(drawn, checksum, group=group)
    others = [rank for rank, other in enumerate(drawn) if other != drawn[0]]
    if others:
        raise ValueError(
            f"{name} drew another order on rank {others[0]} of those that share the data than on rank 0, and samples "
            "would be lost; let it draw from generators that it holds or the global ones, which are seeded alike "
            "on every rank, or let one rank read for all, with dispatch=True"
        )
