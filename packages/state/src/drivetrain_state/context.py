"""The context of a process: its ranks, device, group and store, as a frozen value that is passed explicitly."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from drivetrain_state.compat import group_by_name
from drivetrain_state.device_traits import DeviceTraits, traits_of
from drivetrain_state.errors import ConnectError
from drivetrain_state.hang.progress_record import ProgressRecord
from drivetrain_state.mesh import MeshPlan, ParallelDims, View
from drivetrain_state.rank_group import RankGroup, end_group
from drivetrain_state.settings import StateSettings
from drivetrain_state.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """The ranks, device and process group of this process, as returned by `connect`.

    As a context manager, it closes itself at the end of the block.

    Attributes:
        device: The device that this process computes on.
        mesh: The mesh of the parallel dimensions, if any were requested.
        plan: The plan of that mesh; without a mesh, all ranks are data parallel.
        parallelism: The parallel dimensions as requested.
        progress: The last progress, which the watchdog reads.
        owns_group: Whether `close` destroys the process group; False if the group existed before.
        control: The store of `control_store`; None until the first use.
    """

    topology: Topology
    device: torch.device
    mesh: DeviceMesh | None = None
    plan: MeshPlan | None = None
    parallelism: ParallelDims | None = None
    settings: StateSettings = field(default_factory=StateSettings)
    progress: ProgressRecord = field(default_factory=ProgressRecord)
    owns_group: bool = False
    control: list[Store] = field(default_factory=list[Store], repr=False)
    _has_group: bool = False
    _ranks: dict[View, RankGroup] = field(default_factory=dict[View, RankGroup], repr=False)
    _group_names: dict[tuple[int, ...], Any] = field(default_factory=dict[tuple[int, ...], Any], repr=False)
    _on_close: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def group(self) -> ProcessGroup | None:
        """The default process group; None if a single process has none.

        The property looks the group up, because a stored reference would keep the group's threads running, and
        threads that run while the interpreter shuts down abort the process.

        Raises:
            ConnectError: If the group has been destroyed.
        """
        if not self._has_group:
            return None
        if not dist.is_initialized():
            raise ConnectError(
                "the process group has ended: the first context or Accelerator to connect owns it and was closed; "
                "close that one last"
            )
        return dist.group.WORLD

    def ranks(self, view: View) -> RankGroup:
        """Return the ranks of a view of the mesh that this process belongs to; see `drivetrain_state.mesh.VIEWS`.

        Example:
            >>> from drivetrain_state import StateSettings, connect
            >>> with connect(StateSettings(device="cpu")) as context:
            ...     context.ranks("reads").size
            1
        """
        if (found := self._ranks.get(view)) is None:
            if view not in (known := get_args(View)):
                raise ValueError(f"{view!r} is no view of the mesh: {', '.join(known)} are")
            plan = self.plan or MeshPlan(names=("data",), sizes=(self.topology.world_size,))
            found = self._ranks[view] = RankGroup(
                plan.parts(view),
                self.topology.rank,
                find_group=self._group_of,
                timeout_seconds=self.settings.timeout_seconds,
            )
        return found

    def _group_of(self, found: RankGroup) -> ProcessGroup | None:
        """Return the process group of some ranks: the world's, an axis's of the mesh, or one that is created once.

        The names of groups are stored, and not the groups: see `group`.
        """
        world, ranks = self.group, found.ranks
        if world is None or found.size == self.topology.world_size:
            return world
        if (name := self._group_names.get(ranks)) is not None:
            return group_by_name(name)
        axes = () if self.mesh is None or self.plan is None else self.plan.names
        for axis in axes:
            if self.mesh is not None and self.ranks(cast("View", axis)).ranks == ranks:
                group = self.mesh.get_group(axis)
                break
        else:
            group = found.new_group()
            self.before_close(partial(end_group, group.group_name))
        self._group_names[ranks] = group.group_name
        return group

    @property
    def traits(self) -> DeviceTraits:
        """The traits of this kind of device."""
        return traits_of(self.device.type)

    def applied(self) -> dict[str, object]:
        """Return the settings in effect, read back from torch, for an effective plan."""
        return {"device": self.device.type, "deterministic": torch.are_deterministic_algorithms_enabled()}

    def before_close(self, callback: Callable[[], object]) -> None:
        """Register a callback for `close` to call before the process group is destroyed; the last one runs first."""
        self._on_close.callback(callback)

    def close(self) -> None:
        """Run the registered callbacks, stop the watchdog, and destroy the process group if this context owns it.

        A second call does nothing.
        """
        self._on_close.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
