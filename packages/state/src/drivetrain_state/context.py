"""What a process knows about itself and its peers: a frozen value, passed explicitly."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from drivetrain_state.errors import ConnectError
from drivetrain_state.hang.progress_record import Watch
from drivetrain_state.settings import StateSettings
from drivetrain_state.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """This process among the others; `connect` makes it.

    Used as a context manager it closes itself at the end.

    Attributes:
        topology: Ranks and counts.
        device: Where this process computes.
        mesh: The mesh of the parallel dimensions, if any were asked for.
        settings: What it was connected with.
        watch: The progress mark that the watchdog reads.
        owns_group: Whether `close` ends the group: false where the group was there before.
    """

    topology: Topology
    device: torch.device
    mesh: DeviceMesh | None = None
    settings: StateSettings = field(default_factory=StateSettings)
    watch: Watch = field(default_factory=Watch)
    owns_group: bool = False
    _has_group: bool = False
    _on_close: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def group(self) -> ProcessGroup | None:
        """The default process group; None in one process.

        It is looked up, not held: a group's threads end when nobody holds it any more, and those that still ran
        while the interpreter ends would abort the process.

        Raises:
            ConnectError: It has ended.
        """
        if not self._has_group:
            return None
        if not dist.is_initialized():
            raise ConnectError(
                "the process group has ended: the context, or Accelerator, that was connected first made it, and was "
                "closed; close that one last"
            )
        return dist.group.WORLD

    def applied(self) -> dict[str, object]:
        """What is in force of the settings, read back from torch, for an effective plan."""
        return {"device": self.device.type, "deterministic": torch.are_deterministic_algorithms_enabled()}

    def before_close(self, callback: Callable[[], object]) -> None:
        """Have something done when this is closed, before the process group ends; what came last is done first."""
        self._on_close.callback(callback)

    def close(self) -> None:
        """Do what was to be done before, stop the watchdog, end the process group if this context made it.

        A second call does nothing.
        """
        self._on_close.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
