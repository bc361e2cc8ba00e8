"""The ranks of a process and the counts of processes and nodes, as a frozen value."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The ranks of one process, from 0, and the counts of processes and nodes.

    `rank` counts over all nodes, `local_rank` on this node; `node_rank` is this node's number.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for index, count in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "num_nodes"),
        ):
            position, size = getattr(self, index), getattr(self, count)
            if not 0 <= position < size:
                raise ValueError(
                    f"{index}={position} with {count}={size}: {index} counts from 0 to {count} - 1; "
                    "check the launcher's variables"
                )
        if self.local_world_size > self.world_size:
            raise ValueError(
                f"local_world_size={self.local_world_size} with world_size={self.world_size}: "
                "a node cannot hold more processes than there are"
            )

    @property
    def is_main(self) -> bool:
        """True if this process has rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True if this process is the first of its node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """True if this process has the highest rank."""
        return self.rank == self.world_size - 1


def topology_from_hosts(hosts: Sequence[str], rank: int) -> Topology:
    """Return the topology of `rank` from the host name of each rank, in rank order.

    Nodes are numbered in order of their first rank, so that all ranks compute the same numbers.
    """
    nodes = list(dict.fromkeys(hosts))
    mates = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return Topology(
        rank=rank,
        local_rank=mates.index(rank),
        world_size=len(hosts),
        local_world_size=len(mates),
        node_rank=nodes.index(hosts[rank]),
        num_nodes=len(nodes),
    )
