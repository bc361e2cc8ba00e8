"""The facts of a machine, by which questions and recommended answers are chosen."""

import os
import platform
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drivetrain_clusters.registry import find_placement
from drivetrain_config import environ, sections
from drivetrain_config.plugins.installed import entry_points
from drivetrain_launcher.module_summary import module_summary
from drivetrain_launcher.plan.host_detection import accelerator_may_exist
from drivetrain_messages import format_count, format_size


def detect_machine() -> dict[str, Any]:
    """Detect the facts that `ask` functions of fields know, by the names that `drivetrain_config` lists for advice.

    What is unknown is None. The accelerators are those that this process may use; the memory is that of the smallest,
    the name the driver's of the first. torch is imported only if an accelerator's driver is loaded.
    """
    placement = find_placement(environ.child_environment())
    backends = _summaries("drivetrain.backends")
    for name, section in sections(only=backends).items():
        missing = [module for module in getattr(section, "requires", ()) if find_spec(module) is None]
        if missing:
            backends[name] = f"needs {', '.join(missing)}, which is not installed"
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes = None
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found: dict[str, Any] = {
        "machine.host": platform.node() or "localhost",
        "machine.folder": Path.cwd().name or "run",
        "machine.num_cpus": num_cpus,
        "machine.memory_bytes": memory_bytes,
        "machine.accelerator": None,
        "machine.accelerator_count": 0,
        "machine.accelerator_name": "",
        "machine.accelerator_memory_bytes": None,
        "machine.can_fp16": False,
        "machine.can_bf16": False,
        "cluster.name": None if placement is None else placement.cluster,
        "cluster.num_nodes": None if placement is None else placement.num_nodes,
        "installed.backends": backends,
        "installed.trackers": _summaries("drivetrain.trackers"),
    }
    if accelerator_may_exist():
        from drivetrain_state import best_device_kind, detect_devices

        if (kind := best_device_kind()) != "cpu":
            group = detect_devices()[0]
            found |= {
                "machine.accelerator": kind,
                "machine.accelerator_count": group.count,
                "machine.accelerator_name": group.names[0] if group.names else kind,
                "machine.accelerator_memory_bytes": min(group.memory_bytes) if group.memory_bytes else None,
                "machine.can_fp16": group.ability.fp16,
                "machine.can_bf16": group.ability.bf16,
            }
    return found


def describe_machine(known: Mapping[str, Any]) -> str:
    """Return a machine in one line: its accelerators, its cores and memory, and the job that this process is in."""
    memory, cluster = known["machine.memory_bytes"], known["cluster.name"]
    cores = format_count(known["machine.num_cpus"], "CPU core")
    cores += "" if memory is None else f", {format_size(memory)} of memory"
    devices = "no accelerator"
    if known["machine.accelerator"] is not None:
        memory = known["machine.accelerator_memory_bytes"]
        size = "" if memory is None else f" ({format_size(memory)})"
        devices = f"{known['machine.accelerator_count']} x {known['machine.accelerator_name']}{size}"
    job = "" if cluster is None else f", in a job of {known['cluster.num_nodes']} nodes under {cluster}"
    return f"{known['machine.host']}: {devices}, {cores}{job}"


def _summaries(group: str) -> dict[str, str]:
    return {point.name: module_summary(point.value.partition(":")[0]) for point in entry_points(group)}
