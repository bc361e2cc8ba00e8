"""The facts of a machine, by which questions and recommended answers are chosen."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drivetrain_clusters.registry import find_placement
from drivetrain_config import environ, sections
from drivetrain_config.plugins.installed import entry_points
from drivetrain_launcher.module_summary import module_summary
from drivetrain_launcher.plan.host_detection import accelerator_may_exist
from drivetrain_messages import format_count, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The facts of this machine, of the job that this process is in, and of what is installed; None if unknown.

    `num_cpus` and `accelerator_count` count what this process may use; the memory is that of the machine and of the
    smallest accelerator, `accelerator_name` the driver's name of the first. `backends` and `trackers` have summaries.
    """

    host: str = "localhost"
    folder: str = "run"
    num_cpus: int = 1
    memory_bytes: int | None = None
    accelerator: str | None = None
    accelerator_count: int = 0
    accelerator_name: str = ""
    accelerator_memory_bytes: int | None = None
    can_fp16: bool = False
    can_bf16: bool = False
    cluster: str | None = None
    num_nodes: int | None = None
    backends: Mapping[str, str] = field(default_factory=dict[str, str])
    trackers: Mapping[str, str] = field(default_factory=dict[str, str])

    def known(self) -> dict[str, Any]:
        """Return the facts by name, such as "machine.num_cpus", for the `ask` functions of fields."""
        outside = ("cluster", "num_nodes", "backends", "trackers")
        names = (name for name in self.__dataclass_fields__ if name not in outside)
        return {
            **{f"machine.{name}": getattr(self, name) for name in names},
            "cluster.name": self.cluster,
            "cluster.num_nodes": self.num_nodes,
            "installed.backends": self.backends,
            "installed.trackers": self.trackers,
        }

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {format_size(self.memory_bytes)} of memory"
        cores = f"{format_count(self.num_cpus, 'CPU core')}{memory}"
        if self.accelerator is None:
            found = f"no accelerator, {cores}"
        else:
            memory = self.accelerator_memory_bytes
            size = "" if memory is None else f" ({format_size(memory)})"
            found = f"{self.accelerator_count} x {self.accelerator_name}{size}, {cores}"
        job = "" if self.cluster is None else f", in a job of {self.num_nodes} nodes under {self.cluster}"
        return f"{self.host}: {found}{job}"


def detect_machine() -> MachineFacts:
    """Detect the facts of this machine; torch is imported only if an accelerator's driver is loaded."""
    placement = find_placement(environ.child_environment())
    backends = _summaries("drivetrain.backends")
    for name, section in sections(only=backends).items():
        missing = [module for module in getattr(section, "requires", ()) if find_spec(module) is None]
        if missing:
            backends[name] = f"needs {', '.join(missing)}, which is not installed"
    accelerators: dict[str, Any] = {}
    if accelerator_may_exist():
        from drivetrain_state import best_device_kind, detect_devices

        if (kind := best_device_kind()) != "cpu":
            group = detect_devices()[0]
            accelerators = {
                "accelerator": kind,
                "accelerator_count": group.count,
                "accelerator_name": group.names[0] if group.names else kind,
                "accelerator_memory_bytes": min(group.memory_bytes) if group.memory_bytes else None,
                "can_fp16": group.ability.fp16,
                "can_bf16": group.ability.bf16,
            }
    knows_memory = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ())
    return MachineFacts(
        host=platform.node() or "localhost",
        folder=Path.cwd().name or "run",
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if knows_memory else None,
        cluster=None if placement is None else placement.cluster,
        num_nodes=None if placement is None else placement.num_nodes,
        backends=backends,
        trackers=_summaries("drivetrain.trackers"),
        **accelerators,
    )


def _summaries(group: str) -> dict[str, str]:
    return {point.name: module_summary(point.value.partition(":")[0]) for point in entry_points(group)}
