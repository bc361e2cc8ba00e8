"""Divide a host's cores among its ranks, each near its accelerator (pure)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from drivetrain_launcher.plan.host_detection import Core, CpuTopology, format_cpu_list
from drivetrain_messages import format_count

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreBinding:
    """The cores of a rank, which its threads and worker processes inherit.

    `cpus` numbers the hardware threads as `sched_setaffinity` does; `is_near_device` says whether they are on the
    NUMA node of the rank's accelerator.
    """

    cpus: tuple[int, ...]
    num_cores: int
    numa_nodes: tuple[int, ...]
    is_near_device: bool = False

    def __str__(self) -> str:
        cores = format_count(self.num_cores, "core")
        nodes = f"NUMA node{'s' if len(self.numa_nodes) > 1 else ''} {format_cpu_list(self.numa_nodes)}"
        near = ", that of its device" if self.is_near_device else ""
        return f"CPUs {format_cpu_list(self.cpus)} ({cores} of {nodes}{near})"


def plan_bindings(topology: CpuTopology, num_ranks: int) -> tuple[CoreBinding, ...]:
    """Return separate cores for each rank, by local rank, on the NUMA node of the rank's accelerator.

    The ranks of a node divide its cores into equal runs of neighbours. Ranks on the CPU, or with an accelerator
    whose node is unknown or has no usable core, go to nodes without ranks first, then to the node with the most cores
    per rank. If a node has fewer cores than ranks, its ranks share cores. Rank i has the i-th accelerator.
    """
    by_node: dict[int, list[Core]] = {}
    for core in topology.cores:
        by_node.setdefault(core.numa_node, []).append(core)
    nodes_of_devices = (*topology.device_nodes, *[None] * num_ranks)[:num_ranks]
    near = [node if node in by_node else None for node in nodes_of_devices]
    if num_ranks < len(by_node) and not any(node is not None for node in near):
        # Fewer ranks than nodes: each rank takes whole nodes.
        return tuple(
            _bind([core for node in nodes for core in node])
            for nodes in _divide(list(by_node.values()), num_ranks)
        )
    ranks_of = _assign_nodes(near, {node: len(cores) for node, cores in by_node.items()})
    bindings: dict[int, CoreBinding] = {}
    for node, ranks in ranks_of.items():
        for rank, cores in zip(ranks, _divide(by_node[node], len(ranks)), strict=True):
            bindings[rank] = _bind(cores, is_near_device=near[rank] is not None)
    return tuple(bindings[rank] for rank in range(num_ranks))


def unused_cores(topology: CpuTopology, bindings: Sequence[CoreBinding]) -> dict[int, int]:
    """Return the number of usable cores without a rank, by NUMA node; empty if every core has one."""
    used = {cpu for binding in bindings for cpu in binding.cpus}
    return dict(Counter(core.numa_node for core in topology.cores if used.isdisjoint(core.cpus)))


def _assign_nodes(near: Sequence[int | None], num_cores: dict[int, int]) -> dict[int, list[int]]:
    """Return the ranks of each node, in order."""
    counts = Counter(node for node in near if node is not None)
    for _ in range(near.count(None)):
        # A node without a rank, else the one where one more rank would have most cores.
        counts[max(num_cores, key=lambda node: (not counts[node], num_cores[node] / (counts[node] + 1)))] += 1
    placed: dict[int, list[int]] = {node: [] for node in num_cores if counts[node]}
    for rank, node in enumerate(near):
        if node is not None:
            placed[node].append(rank)
    for rank, node in enumerate(near):
        if node is None:  # neighbours by rank on one node
            free = next(each for each, ranks in placed.items() if len(ranks) < counts[each])
            placed[free].append(rank)
    return {node: sorted(ranks) for node, ranks in placed.items()}


def _divide(items: list[_Item], num_parts: int) -> list[list[_Item]]:
    """Divide items into runs whose lengths differ by one at most; repeat items if there are fewer than runs."""
    if len(items) < num_parts:
        return [[items[part * len(items) // num_parts]] for part in range(num_parts)]
    length, longer = divmod(len(items), num_parts)
    starts = [part * length + min(part, longer) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


def _bind(cores: Sequence[Core], *, is_near_device: bool = False) -> CoreBinding:
    return CoreBinding(
        cpus=tuple(sorted(cpu for core in cores for cpu in core.cpus)),
        num_cores=len(cores),
        numa_nodes=tuple(sorted({core.numa_node for core in cores})),
        is_near_device=is_near_device,
    )
