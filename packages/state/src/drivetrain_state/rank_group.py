"""The ranks of a view of the mesh, and the process group that they communicate in."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from drivetrain_state.compat import group_by_name


class RankGroup:
    """Some ranks of the world, with this process among them. It has no process group before the first use.

    Attributes:
        ranks: The numbers of the ranks in the world, in rising order.
        index: The position of this process in `ranks`.
        size: The number of ranks.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, *, find_group: Callable[[Sequence[int]], ProcessGroup | None]
    ) -> None:
        self.ranks = ranks
        self.index = ranks.index(rank)
        self.size = len(ranks)
        self._find_group = find_group
        self._name: Any = None  # torch's own type of names

    @property
    def process_group(self) -> ProcessGroup | None:
        """The group of these ranks; None if the process has no group at all. The first use is called on all of them.

        The name of the group is stored, and not the group: a reference would keep the group's threads running, and
        threads that run while the interpreter shuts down abort the process.
        """
        if self._name is not None:
            return group_by_name(self._name)
        group = self._find_group(self.ranks)
        if group is not None and group is not dist.group.WORLD:
            self._name = group.group_name
        return group


def make_group(ranks: Sequence[int], *, backend: str | None = None) -> ProcessGroup:
    """Create a process group of a backend, or of that of the default group. Called on its ranks alone.

    torch names the group after its ranks and the number of groups that the process has: all ranks create their groups
    in the same order.
    """
    made = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)  # this process is a member
    return made


def end_group(group: ProcessGroup) -> None:
    """Destroy a process group, unless the default group has ended and has taken it along."""
    if dist.is_initialized():
        dist.destroy_process_group(group)
