"""The settings of a launch inside a cluster's job: what the job says, and what the user said beside it.

A job's values become a layer of settings like any other, with the variables that they were read from as their source.
All functions are pure.
"""

from collections.abc import Mapping
from typing import Any

from drivetrain_clusters.protocol import JobPlacement
from drivetrain_config import Layers
from drivetrain_config.source import Entry, Source
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.settings import LaunchSettings

_SECTION = "launch"
_EMPTY = ("", "()", "[]")
# Settings that only a launcher which starts ranks can honour, and the values that leave them off.
_OF_LAUNCHERS_WITH_RANKS: Mapping[str, tuple[str, ...]] = {
    "max_restarts": ("0",),
    "log_dir": ("",),
    "devices": _EMPTY,
    "preload": _EMPTY,
    "show_ranks": _EMPTY,
    "tail": ("0",),
    "prefix": ("others", "none"),
}
Said = Mapping[str, tuple[Entry, ...]]


def place_layers(layers: Layers, place: JobPlacement) -> Layers:
    """Return the layers with the values of a job added; a setting that contradicts the job is a LaunchError."""
    said = layers.of_section(_SECTION)
    _check(said, place)
    added: dict[str, tuple[Any, str]] = {}
    if not place.is_one_task_per_rank:
        added = _of_node(said, place)
    elif place.num_tasks % place.num_nodes == 0:  # settings know only nodes with the same number of processes
        added = {"num_nodes": (place.num_nodes, place.source("num_nodes"))}
    entries = {
        (_SECTION, name): (Entry(str(value), Source("environment", source)),)
        for name, (value, source) in added.items()
        if name not in said
    }
    return Layers({**layers.entries, **entries}, layers.file)


def asked_processes(
    settings: LaunchSettings, sources: Mapping[str, Source], place: JobPlacement
) -> tuple[int, str]:
    """Return the number of processes on this node that the job or the user has asked for, and what says so.

    Returns:
        0 and an empty text if nothing asks for a number.
    """
    if place.is_one_task_per_rank:
        return place.tasks_per_node, f"{place.source('tasks_per_node')}={place.tasks_per_node}"
    if settings.processes_per_node is not None:
        count = settings.processes_per_node
        return count, f"processes_per_node={count} from {sources['processes_per_node']}"
    if settings.num_processes is not None:
        said = f"num_processes={settings.num_processes} from {sources['num_processes']}"
        return settings.num_processes // settings.num_nodes, f"{said}, over {settings.num_nodes} nodes"
    return 0, ""


def check_devices(place: JobPlacement, *, processes: int, source: str, wants_cpu: bool) -> None:
    """Check that a job has bound enough accelerators for the processes of this node.

    Args:
        place: The place of this process in a job.
        processes: The number of processes on this node.
        source: The settings or variables that the number follows from.
        wants_cpu: Whether the run uses no accelerator.
    """
    # With one accelerator, each task may well have its own; with several, tasks share what they see.
    if wants_cpu or not place.devices or (place.is_one_task_per_rank and len(place.devices) == 1):
        return
    if processes > (bound := len(place.devices)):
        raise LaunchError(
            f"{processes} processes on this node ({source}), but {place.cluster} bound this task to {bound} "
            f"accelerators, {place.source('devices')}={','.join(place.devices)}: start at most {bound}, ask the "
            "cluster for more, or say --cpu to train on the CPU"
        )


def _of_node(said: Said, place: JobPlacement) -> dict[str, tuple[Any, str]]:
    """Return the settings of a launcher that starts the ranks of its node, with their sources."""
    # The name of the run is another one each time that the job is started again.
    run_id = f"{place.job_id}-{place.restart_count}" if place.restart_count else place.job_id
    added: dict[str, tuple[Any, str]] = {"rdzv_id": (run_id, place.source("job_id"))}
    if place.num_nodes == 1:
        return added
    added["num_nodes"] = (place.num_nodes, place.source("num_nodes"))
    added["master_port"] = (place.master_port, place.source("master_port"))
    if place.master_addr:
        added["master_addr"] = (place.master_addr, place.source("master_addr"))
    backend, restarts = _said(said, "rdzv_backend"), _said(said, "max_restarts")
    if backend is None and restarts is not None and str(restarts.value) != "0":
        added["rdzv_backend"] = ("c10d", f"max_restarts={restarts.value} from {restarts.source}")
    elif backend is None or backend.value != "c10d":
        added["node_rank"] = (place.node_rank, place.source("node_rank"))
    return added


def _check(said: Said, place: JobPlacement) -> None:
    """Refuse settings that contradict the job, and those without effect where it started each rank itself."""
    facts: dict[str, tuple[object, str]] = {
        "num_nodes": (place.num_nodes, "num_nodes"),
        "node_rank": (place.node_rank, "node_rank"),
    }
    if place.is_one_task_per_rank:
        facts["num_processes"] = (place.num_tasks, "num_tasks")
        facts["processes_per_node"] = (place.tasks_per_node, "tasks_per_node")
    for name, (value, attribute) in facts.items():
        entry = _said(said, name)
        if entry is not None and str(entry.value) != str(value):
            raise _contradiction(name, entry, place, str(value), attribute)
    if (entry := _said(said, "master_addr")) is not None and place.master_addr:
        asked, job = str(entry.value), place.master_addr
        # The full name of the same host is no other address.
        if asked != job and not asked.startswith(f"{job}.") and not job.startswith(f"{asked}."):
            raise _contradiction("master_addr", entry, place, job, "master_addr")
    for name, without_effect in _OF_LAUNCHERS_WITH_RANKS.items() if place.is_one_task_per_rank else ():
        entry = _said(said, name)
        if entry is not None and str(entry.value) not in without_effect:
            raise LaunchError(
                f"{_SECTION}.{name}={entry.value} ({entry.source}): {place.cluster} has started one task per rank, "
                f"{place.source('num_tasks')}={place.num_tasks} on {place.num_nodes} nodes, so that no launcher "
                "starts ranks; start one task per node instead, or leave it out"
            )


def _contradiction(name: str, entry: Entry, place: JobPlacement, value: str, attribute: str) -> LaunchError:
    remedy = {
        "master_addr": "leave it out, or export MASTER_ADDR in the job to reach node 0 by another of its addresses",
        "node_rank": "leave it out",
    }.get(name, "leave it out, or ask the cluster for it")
    return LaunchError(
        f"{_SECTION}.{name}={entry.value} ({entry.source}) contradicts the job that {place.cluster} started, which "
        f"has {value} ({place.source(attribute)}): {remedy}; --cluster none ignores the job"
    )


def _said(said: Said, name: str) -> Entry | None:
    entries = said.get(name, ())
    return entries[0] if entries else None
