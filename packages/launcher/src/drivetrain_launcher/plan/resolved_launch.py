"""The settings of a launch, resolved once from the command line, the environment, a file and the cluster's job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain_clusters.protocol import JobPlacement
from drivetrain_clusters.registry import find_placement
from drivetrain_config import Layers, Resolved, Source, environ, resolve, sections
from drivetrain_config.settings.schema import FieldSpec, specs
from drivetrain_launcher.plan.placed_settings import place_layers
from drivetrain_launcher.settings import LaunchSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSetting:
    """A setting with a value from outside the script.

    Attributes:
        spec: The field of the section.
        value: The value in force.
        source: The source of the value.
    """

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
    def file_notes(self) -> tuple[str, ...]:
        """A note of a settings file that the user did not name."""
        file = self.layers.file
        if file is None or file.place is None:
            return ()
        return (f"settings from {file}; --config none leaves them out",)


def resolve_launch(layers: Layers, *, placement: JobPlacement | None = None) -> ResolvedLaunch:
    """Resolve every section of a launch, so that a mistake is an error once here, not on each rank.

    Args:
        layers: The command line, environment and file.
        placement: The place of this process in a cluster's job, whose values join the layers.

    Raises:
        ConfigError: A value is invalid.
        LaunchError: A setting contradicts the job.
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


def find_own_placement(layers: Layers) -> JobPlacement | None:
    """Return the place of this process in a cluster's job; None outside any job, and with `launch.cluster="none"`.

    A launcher around this one that has set the ranks, such as torchrun, decides in place of the cluster.

    Raises:
        ClusterError: There is no such cluster, or the variables of the job are missing or contradict each other.
    """
    entries = layers.of_section("launch").get("cluster")
    asked = str(entries[0].value) if entries else "auto"
    environment = environ.child_environment()
    if asked == "none" or {"RANK", "LOCAL_RANK"} <= environment.keys():
        return None
    return find_placement(environment, asked=asked)
