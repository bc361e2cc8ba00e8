"""Whether ranks that draw for themselves have drawn the same."""

from collections.abc import Callable
from typing import TypeAlias

import torch.distributed as dist

# Told the name of a sampler and a checksum of what it drew.
Agree: TypeAlias = Callable[[str, int], None]


def check_agreement(group: dist.ProcessGroup, name: str, checksum: int) -> None:
    """Hold what a sampler drew here against what it drew on the other ranks. Called on all ranks of the group.

    Args:
        group: The ranks that share the data.
        name: The sampler's.
        checksum: Of what it drew.

    Raises:
        ValueError: It drew something else on another rank; raised on all of them.
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
