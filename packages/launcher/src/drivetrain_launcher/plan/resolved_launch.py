"""The settings of a launch, resolved once from the command line, the environment, a file and the cluster's job.

A job's values become a layer of settings like any other, with the variables that they were read from as their source.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain_clusters.protocol import JobPlacement
from drivetrain_clusters.registry import find_placement
from drivetrain_config import Layers, Resolved, environ, resolve, sections
from drivetrain_config.settings.schema import FieldSpec, specs
from drivetrain_config.source import Entry, Source
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.settings import LaunchSettings

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSetting:
    """A setting with a value from outside the script: its field, the value in force, and the value's source."""

    spec: FieldSpec
    value: Any
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLaunch:
    """The settings of a launch, each with its source and its field.

    Attributes:
        layers: The values as they were given, to hand to the ranks.
        sections: `launch`, `state` and every section with a given value, by name.
        given: The settings that are not left to their defaults.
        placement: The place of this process in a cluster's job; None outside any job.
    """

    layers: Layers
    sections: Mapping[str, Resolved[Any]]
    given: tuple[GivenSetting, ...]
    placement: JobPlacement | None

    @property
    def launch(self) -> LaunchSettings:
        """The `launch` section."""
        return self.sections["launch"].value

    @property
    def device(self) -> str:
        """The requested kind of device; `run.cpu` exists only if the umbrella package is installed."""
        wants_cpu = "run" in self.sections and self.sections["run"].value.cpu
        return "cpu" if wants_cpu else self.sections["state"].value.device

    @property
    def mixed_precision(self) -> str:
        """The requested precision, "no" without the umbrella package."""
        return self.sections["run"].value.mixed_precision if "run" in self.sections else "no"

    @property
    def file_notes(self) -> tuple[str, ...]:
        """A note of a settings file that the user did not name."""
        file = self.layers.file
        if file is None or file.place is None:
            return ()
        return (f"settings from {file}; --config none leaves them out",)


def find_own_placement(layers: Layers) -> JobPlacement | None:
    """Return the place of this process in a cluster's job; None outside any job, and with `launch.cluster="none"`.

    If an outer launcher, such as torchrun, has set the ranks, that launcher decides instead of the cluster.
    """
    said = layers.of_section("launch").get("cluster")
    asked = str(said[0].value) if said else "auto"
    environment = environ.child_environment()
    if asked == "none" or {"RANK", "LOCAL_RANK"} <= environment.keys():
        return None
    return find_placement(environment, asked=asked)


def resolve_launch(layers: Layers, *, placement: JobPlacement | None = None) -> ResolvedLaunch:
    """Resolve every section of a launch, so that a mistake is an error once here, not on each rank.

    The values of a job join the layers; a LaunchError says that a setting contradicts the job.
    """
    if placement is not None:
        layers = place_layers(layers, placement)
    names = {section for section, _ in layers.entries}
    found = sections(only={*names, "launch", "state"})
    resolved = {name: resolve(kind, section=name, layers=layers) for name, kind in found.items()}
    given = tuple(
        GivenSetting(
            spec=spec,
            value=getattr(resolved[name].value, spec.name),
            source=resolved[name].sources[spec.name],
        )
        for name in found
        if name in names
        for spec in specs(found[name], name)
        if (name, spec.name) in layers.entries
    )
    return ResolvedLaunch(layers=layers, sections=resolved, given=given, placement=placement)


def place_layers(layers: Layers, place: JobPlacement) -> Layers:
    """Return the layers with the job's values for settings that the user left out; sources are its variables."""
    said = {name: entries[0] for name, entries in layers.of_section("launch").items()}
    _check_against_job(said, place)
    added: dict[str, tuple[Any, str]] = {}
    facts: list[str] = []
    if place.is_one_task_per_rank:
        # Settings know only nodes with the same number of processes.
        facts += [] if place.num_tasks % place.num_nodes else ["num_nodes"]
    else:
        # A job that the cluster starts again is another run.
        run_id = f"{place.job_id}-{place.restart_count}" if place.restart_count else place.job_id
        added["rdzv_id"] = (run_id, place.source("job_id"))
        if place.num_nodes > 1:
            facts += ["num_nodes", "master_port", *(["master_addr"] if place.master_addr else [])]
            backend, restarts = said.get("rdzv_backend"), said.get("max_restarts")
            if backend is None and restarts is not None and str(restarts.value) != "0":
                added["rdzv_backend"] = ("c10d", f"max_restarts={restarts.value} from {restarts.source}")
            elif backend is None or backend.value != "c10d":
                facts.append("node_rank")
    added |= {name: (getattr(place, name), place.source(name)) for name in facts}
    entries = {
        ("launch", name): (Entry(str(value), Source("environment", source)),)
        for name, (value, source) in added.items()
        if name not in said
    }
    return Layers({**layers.entries, **entries}, layers.file)


def _check_against_job(said: Mapping[str, Entry], place: JobPlacement) -> None:
    """Refuse settings that contradict the job, or that have no effect if the job started each rank itself."""
    # The attribute of the place that each setting must equal.
    facts = {"num_nodes": "num_nodes", "node_rank": "node_rank"}
    if place.is_one_task_per_rank:
        facts |= {"num_processes": "num_tasks", "processes_per_node": "tasks_per_node"}
    if place.master_addr:
        facts["master_addr"] = "master_addr"
    remedies = {
        "master_addr": "leave it out, or export MASTER_ADDR in the job to reach node 0 by another of its addresses",
        "node_rank": "leave it out",
    }
    for name, attribute in facts.items():
        if name not in said:
            continue
        entry, job = said[name], str(getattr(place, attribute))
        asked = str(entry.value)
        # The full name of the same host is no other address.
        is_same_host = asked.startswith(f"{job}.") or job.startswith(f"{asked}.")
        if asked != job and not (name == "master_addr" and is_same_host):
            raise LaunchError(
                f"launch.{name}={asked} ({entry.source}) contradicts the job that {place.cluster} started, which has "
                f"{job} ({place.source(attribute)}): "
                f"{remedies.get(name, 'leave it out, or ask the cluster for it')}; --cluster none ignores the job"
            )
    for name, without_effect in _OF_LAUNCHERS_WITH_RANKS.items() if place.is_one_task_per_rank else ():
        if name in said and str(said[name].value) not in without_effect:
            raise LaunchError(
                f"launch.{name}={said[name].value} ({said[name].source}): {place.cluster} has started one task per "
                f"rank, {place.source('num_tasks')}={place.num_tasks} on {place.num_nodes} nodes, so that no "
                "launcher starts ranks; start one task per node instead, or leave it out"
            )
