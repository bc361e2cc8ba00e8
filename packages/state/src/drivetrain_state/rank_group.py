"""The ranks of a view of the mesh, and the process group that they communicate in."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from drivetrain_state.compat import group_by_name


class RankGroup:
    """Some ranks of the world, with this process among them.

    Attributes:
        ranks: The numbers of the ranks in the world, in rising order.
        index: The position of this process in `ranks`.
        size: The number of ranks.
        parts: The ranks of each part into which the view divides the world.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[int]],
        rank: int,
        *,
        find_group: Callable[["RankGroup"], ProcessGroup | None],
        timeout_seconds: float,
    ) -> None:
        self.ranks = tuple(next(part for part in parts if rank in part))
        self.index = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.parts, self._find_group = parts, find_group
        self._timeout = timedelta(seconds=timeout_seconds)

    @property
    def process_group(self) -> ProcessGroup | None:
        """The group of these ranks; None if the process has no group at all. The first use is made on all ranks.

        Raises:
            ConnectError: The default group has been destroyed.
        """
        return self._find_group(self)

    def new_group(self, *, backend: str | None = None) -> ProcessGroup:
        """Create a process group of these ranks alone, by default with the default group's backend.

        Called on all ranks of the world, which create the groups of all parts in the same order: torch names a group
        after the number of groups before it, and NCCL divides the default group's connections.
        """
        made = [dist.new_group(list(part), timeout=self._timeout, backend=backend) for part in self.parts]
        return next(group for group in made if isinstance(group, ProcessGroup))  # not NON_GROUP_MEMBER


def end_group(name: Any) -> None:
    """Destroy the process group of a name, unless it has ended with the default group."""
    try:
        group = group_by_name(name)
    except RuntimeError:
        return
    dist.destroy_process_group(group)
