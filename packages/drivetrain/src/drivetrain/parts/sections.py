"""The sections of a run: read from outside the program and from code, and resolved."""

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain.settings import RunSettings
from drivetrain_backends import Backend
from drivetrain_backends.settings import ModelSettings
from drivetrain_checkpoint import CheckpointSettings
from drivetrain_config import ConfigError, Layers, Resolved, Source, resolve, section_names
from drivetrain_config import sections as installed_sections
from drivetrain_config.source import Entry
from drivetrain_data import DataSettings
from drivetrain_messages import suggest
from drivetrain_precision import PrecisionSettings
from drivetrain_state import ParallelDims, StateSettings
from drivetrain_tracking import TrackingSettings


def sections_in_code(sections: Mapping[str, object] | None, **given: object | None) -> Mapping[str, object]:
    """Return the sections given in code, by name; `given` are those that have an argument of their own.

    Raises:
        TypeError: `sections` is not a mapping.
        ValueError: A section is given twice.
    """
    if not isinstance(sections, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
        raise TypeError(
            f"sections={sections!r}: must be a mapping of sections by name, such as "
            '{"ddp": {"static_graph": True}}'
        )
    said = {name: section for name, section in given.items() if section is not None}
    if twice := sorted(said.keys() & (sections or {}).keys()):
        raise ValueError(f"sections[{twice[0]!r}] and its own argument are both given: give one of them")
    return {**(sections or {}), **said}


def read_layers(config: Path | str | Layers | None) -> Layers:
    """Return the settings from outside the program; a file given in code takes precedence over the launcher's."""
    if isinstance(config, Layers):
        return config
    return Layers.of_process(file=None if config is None else Path(config))


class Sections:
    """The sections of a run, resolved from code and layers.

    Args:
        run: The run section's fields as given in code; None means not given.
        in_code: Sections as given in code, by name: dataclasses or mappings of fields.
        layers: The settings from outside the program.

    Attributes:
        resolved: The sections resolved so far, with their sources, by name.
        run: The `run` section.
        state: The `state` section.
        parallel: The `parallel` section.
        precision: The `precision` section.
        model: The `model` section.
        checkpoint: The `checkpoint` section.
        tracking: The `tracking` section.

    Raises:
        ConfigError: A setting is unknown or out of range; the message names its source.
    """

    def __init__(
        self, run: Mapping[str, object | None], in_code: Mapping[str, object], layers: Layers
    ) -> None:
        self.resolved: dict[str, Resolved[Any]] = {}
        self._in_code = {name: dict(_as_mapping(name, section)) for name, section in in_code.items()}
        self._layers = layers
        given = {name: value for name, value in run.items() if value is not None}
        self._in_code["run"] = {**self._in_code.get("run", {}), **given}
        self.run: RunSettings = self._resolve("run", RunSettings)
        if self.run.log_with and self.run.project_dir is None:  # the two may come from different layers
            raise ConfigError(
                f"{self.resolved['run'].sources['log_with']}: log_with={self.run.log_with!r}: a tracker writes into "
                "project_dir, which is not set; give both"
            )
        if self.run.cpu:
            self._place_on_cpu()
        if callable(strategy := self._in_code.get("data", {}).get("strategy")):
            name = getattr(strategy, "__name__", type(strategy).__name__)
            raise ValueError(  # no file or command line could hold it
                f"data.strategy={name}: settings hold 'interleaved', 'block' or 'node'; a function of your own goes "
                "to drivetrain_data.shard_loader(loader, shard, strategy=...) in place of prepare(), and what it "
                "returns is named in backward(loader=) and gather_for_metrics(loader=)"
            )
        self.state: StateSettings = self._resolve("state", StateSettings)
        self.parallel: ParallelDims = self._resolve("parallel", ParallelDims)
        self.precision: PrecisionSettings = self._resolve("precision", PrecisionSettings)
        self.model: ModelSettings = self._resolve("model", ModelSettings)
        self._resolve("data", DataSettings)
        self.checkpoint: CheckpointSettings = self._resolve("checkpoint", CheckpointSettings)
        self.tracking: TrackingSettings = self._resolve("tracking", TrackingSettings)

    def _place_on_cpu(self) -> None:
        """Set the state section's device to the CPU, with the source of the run section's `cpu`."""
        state, source = self._in_code.setdefault("state", {}), self.resolved["run"].sources["cpu"]
        if state.get("device") not in (None, "auto", "cpu"):
            raise ValueError(
                f"cpu=True and sections['state'] with device={state['device']!r} contradict each other: give one of "
                "them"
            )
        state["device"] = Entry("cpu", Source("code", "" if source.kind == "code" else str(source)))

    def of_backend(self, backend: type[Backend]) -> Any:
        """Resolve the section of the chosen backend, after the run's other sections.

        Returns:
            The settings; None if the backend has none.

        Raises:
            ConfigError: A setting is unknown or out of range.
        """
        if backend.settings_section is None:
            return None
        assert backend.settings_type is not None  # a backend defines both or neither
        settings = self._resolve(backend.settings_section, backend.settings_type)
        return settings if self.run.project_dir is None else _in_project(settings, self.run.project_dir)

    def _resolve(self, name: str, kind: type[Any]) -> Any:
        code = self._in_code.pop(name, None)
        self.resolved[name] = resolve(kind, section=name, code=code, layers=self._layers)
        return self.resolved[name].value

    def others(self, backends: Collection[str]) -> dict[str, Resolved[Any]]:
        """Resolve the sections that the run does not read: sections in code, and sections of other backends.

        Args:
            backends: The names of all backends.

        Raises:
            ConfigError: A setting is unknown or out of range.
        """
        outside = {section for section, _ in self._layers.entries if section in backends}
        names = (outside | self._in_code.keys()) - self.resolved.keys()
        found = installed_sections(only=names) if names else {}
        if unknown := sorted(names - found.keys()):
            listed = ", ".join(section_names())
            hint = suggest(unknown[0], section_names())
            raise ConfigError(f"code: there is no section {unknown[0]!r}{hint}; sections here: {listed}")
        return {
            name: resolve(found[name], section=name, code=self._in_code.get(name), layers=self._layers)
            for name in sorted(names)
        }


def _in_project(section: Any, project_dir: Path) -> Any:
    """Return a section whose unset folders are those in the project's folder that their fields name."""
    unset = {
        each.name: project_dir / each.metadata["project_folder"]
        for each in fields(section)
        if "project_folder" in each.metadata and getattr(section, each.name) is None
    }
    return replace(section, **unset) if unset else section


def _as_mapping(name: str, section: object) -> Mapping[str, object]:
    if isinstance(section, Mapping):
        return section
    if not is_dataclass(section):
        raise TypeError(f"sections[{name!r}]={section!r}: a section is its dataclass or a mapping of fields")
    return {each.name: getattr(section, each.name) for each in fields(section)}
