"""Build the parts of an Accelerator from its settings; only this module knows all of them."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drivetrain.choose_trackers import make_trackers
from drivetrain.settings import RunSettings
from drivetrain_backends import AccumulationWindow, Backend, BackendRegistry
from drivetrain_checkpoint import Checkpointer, CheckpointSettings
from drivetrain_checkpoint.storage.place import Place, locate
from drivetrain_config import ConfigError, Layers, Resolved, resolve, section_names
from drivetrain_config import sections as installed_sections
from drivetrain_data import DataSettings, LoaderTracker, Shard
from drivetrain_precision import Policy, PrecisionSettings, choose_policy
from drivetrain_state import Context, ParallelDims, StateSettings, connect
from drivetrain_tracking import Tracker, TrackerGroup, TrackingSettings

logger = logging.getLogger(__name__)

_SECTIONS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "state": StateSettings,
        "precision": PrecisionSettings,
        "data": DataSettings,
        "checkpoint": CheckpointSettings,
        "tracking": TrackingSettings,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of an Accelerator.

    Attributes:
        resolved: The resolved sections with their sources, by name.
        context: The ranks, device and process group.
        shard: The shard of the data that this rank reads.
        readers: For each shard of the data, in order, the first of the ranks that read it.
        policy: The precision policy of the run.
        backend: The backend that trains the models.
        loaders: The loaders being read.
        trackers: The trackers that the run logs to.
        facts: Further facts for the plan, added as they become known.
        checkpointers: The checkpointers used so far, by folder or URL.
    """

    resolved: Mapping[str, Resolved[Any]]
    context: Context
    shard: Shard
    readers: tuple[int, ...]
    policy: Policy
    backend: Backend
    loaders: LoaderTracker
    trackers: TrackerGroup
    facts: dict[str, str] = field(default_factory=dict[str, str])
    checkpointers: dict[Place, Checkpointer] = field(default_factory=dict[Place, Checkpointer])

    @property
    def settings(self) -> RunSettings:
        """The run section."""
        return self.resolved["run"].value

    def project_dir(self, what: str) -> Path:
        """Return the folder of the run.

        Raises:
            ValueError: No folder is set; the message says what needs one.
        """
        directory = self.settings.project_dir
        if directory is None:
            raise ValueError(f"{what} needs a folder: pass one, or set project_dir= of the Accelerator")
        return directory

    def checkpointer(self, directory: Place | str | None) -> Checkpointer:
        """Return the checkpointer of a folder of checkpoints.

        Args:
            directory: The folder or URL; by default the checkpoint section's, or else `project_dir`/checkpoints.
        """
        settings: CheckpointSettings = self.resolved["checkpoint"].value
        if directory is None:
            directory = settings.directory or self.project_dir("saving and loading") / "checkpoints"
        place = locate(directory, settings.storage_options)
        if place not in self.checkpointers:
            self.checkpointers[place] = Checkpointer(self.context, place, settings=settings)
        return self.checkpointers[place]


def sections_in_code(
    data: DataSettings | Mapping[str, object] | None, sections: Mapping[str, object] | None
) -> Mapping[str, object]:
    """Return the sections given in code, by name.

    Raises:
        TypeError: `sections` is not a mapping.
        ValueError: The data section is given twice.
    """
    if not isinstance(sections, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
        raise TypeError(
            f"sections={sections!r}: they are a mapping of sections by name, such as "
            '{"ddp": {"static_graph": True}}'
        )
    if data is None:
        return sections or {}
    if sections and "data" in sections:
        raise ValueError("data= and sections['data'] are both given: say the section once")
    return {**(sections or {}), "data": data}


def read_layers(config: Path | str | Layers | None) -> Layers:
    """Return the settings from outside the program; a file given in code takes precedence over the launcher's."""
    if isinstance(config, Layers):
        return config
    return Layers.of_process(file=None if config is None else Path(config))


def compose(
    *,
    run: Mapping[str, object | None],
    sections: Mapping[str, object],
    parallelism: ParallelDims | None,
    backend_class: type[Backend] | None,
    registry: BackendRegistry,
    layers: Layers,
    trackers: Sequence[Tracker] = (),
) -> Parts:
    """Resolve every section and build the parts. Called on all ranks.

    Args:
        run: The run section's fields as given in code; None means not given.
        sections: Other sections as given in code, by name: dataclasses or mappings of fields.
        parallelism: The parallel dimensions that the ranks are split into.
        backend_class: A backend class given in code, instead of a name.
        registry: The registry that maps a backend's name to its class.
        layers: The settings from outside the program.
        trackers: Tracker objects, in addition to the trackers that the run section names.

    Raises:
        ConfigError: A setting is unknown or out of range; the message names its source.
    """
    resolved, said = _resolve(run, sections, layers)
    settings: RunSettings = resolved["run"].value
    named = backend_class or (None if settings.backend == "auto" else registry.get(settings.backend))
    needs_group = named is not None and named.needs_group
    state = _state(resolved["state"].value, settings)
    context = connect(state, parallelism=parallelism, needs_group=needs_group)
    with ExitStack() as undo:
        undo.callback(context.close)  # a failure below must not leave a process group behind
        parts = _build(context, named, registry, resolved, said, layers, parallelism, trackers)
        undo.pop_all()
    if context.topology.is_main:
        _tell_disagreements(resolved)
    return parts


def _build(
    context: Context,
    named: type[Backend] | None,
    registry: BackendRegistry,
    resolved: dict[str, Resolved[Any]],
    said: dict[str, dict[str, object]],
    layers: Layers,
    parallelism: ParallelDims | None,
    trackers: Sequence[Tracker],
) -> Parts:
    """Build the parts, once the ranks are connected."""
    settings: RunSettings = resolved["run"].value
    policy = choose_policy(settings.mixed_precision, context.device, resolved["precision"].value)
    chosen = named or registry.get(automatic_backend(context.topology.world_size))
    if (name := chosen.settings_section) is not None:
        assert chosen.settings_type is not None  # a backend defines both or neither
        resolved[name] = resolve(chosen.settings_type, section=name, code=said.pop(name, None), layers=layers)
    _check_unused(said)
    backend = chosen(
        context,
        policy,
        window=_window(settings),
        settings=None if name is None else resolved[name].value,
    )
    _check_guard(backend, settings)
    return Parts(
        resolved=resolved,
        context=context,
        shard=_shard(context, parallelism),
        readers=_readers(context, parallelism),
        policy=policy,
        backend=backend,
        loaders=LoaderTracker(),
        trackers=make_trackers(
            settings, trackers, is_main=context.topology.is_main, section=resolved["tracking"].value
        ),
    )


def automatic_backend(world_size: int) -> str:
    """Return the name of the backend that "auto" selects."""
    return "single" if world_size == 1 else "ddp"


def _resolve(
    run: Mapping[str, object | None], sections: Mapping[str, object], layers: Layers
) -> tuple[dict[str, Resolved[Any]], dict[str, dict[str, object]]]:
    """Resolve the sections that every run has; return them, and the values in code of other sections."""
    said = {name: dict(_as_mapping(section)) for name, section in sections.items()}
    run = {**said.pop("run", {}), **{name: value for name, value in run.items() if value is not None}}
    resolved: dict[str, Resolved[Any]] = {"run": resolve(RunSettings, section="run", code=run, layers=layers)}
    settings: RunSettings = resolved["run"].value
    if settings.cpu:
        _say_cpu(said.setdefault("state", {}))
    _check_strategy(said.setdefault("data", {}).get("strategy"))
    for name, kind in _SECTIONS.items():
        resolved[name] = resolve(kind, section=name, code=said.pop(name, None), layers=layers)
    return resolved, said


def _say_cpu(state: dict[str, object]) -> None:
    """Set the state section's device to the CPU.

    Raises:
        ValueError: The section names another device.
    """
    if state.get("device") not in (None, "auto", "cpu"):
        raise ValueError(
            f"cpu=True and sections['state'] with device={state['device']!r} contradict each other: say one of them"
        )
    state["device"] = "cpu"


def _check_strategy(strategy: object) -> None:
    """Refuse a function as strategy, which no file or command line could hold.

    Raises:
        ValueError: The strategy is a function; the message says where to pass it.
    """
    if callable(strategy):
        name = getattr(strategy, "__name__", type(strategy).__name__)
        raise ValueError(
            f"data.strategy={name}: settings hold 'interleaved', 'block' or 'node'; a function of your own goes to "
            "drivetrain_data.shard_loader(loader, shard, strategy=...) in place of prepare(), and what it returns is "
            "named in backward(loader=) and gather_for_metrics(loader=)"
        )


def _check_unused(said: Mapping[str, Mapping[str, object]]) -> None:
    """Check sections that this launch does not use, such as those of a backend that other launches choose."""
    for name, code in said.items():
        found = installed_sections(only={name})
        if name not in found:
            listed = ", ".join(section_names())
            raise ConfigError(f"code: there is no section {name!r}; sections here: {listed}")
        resolve(found[name], section=name, code=code)


def _state(state: StateSettings, settings: RunSettings) -> StateSettings:
    """Return the state section with the project's folder as the default folder for hang reports."""
    return replace(state, hang_report_directory=state.hang_report_directory or settings.project_dir)


def _tell_disagreements(resolved: Mapping[str, Resolved[Any]]) -> None:
    """Warn of each field on which code and another layer disagree."""
    for section in resolved.values():
        for disagreement in section.disagreements:
            logger.warning("%s", disagreement)


def _window(settings: RunSettings) -> AccumulationWindow:
    return AccumulationWindow(
        settings.gradient_accumulation_steps, nonfinite_gradients=settings.nonfinite_gradients
    )


def _check_guard(backend: Backend, settings: RunSettings) -> None:
    """Refuse to check gradients for infinities and NaNs under a backend that does not support it.

    Raises:
        ConfigError: The settings request the check, and the backend does not support it.
    """
    if settings.nonfinite_gradients != "ignore" and "nonfinite_gradients" not in backend.applied():
        raise ConfigError(
            f"run.nonfinite_gradients={settings.nonfinite_gradients!r}: {type(backend).__name__} does not look for "
            "infinities and NaNs in gradients; leave it at 'ignore', or choose another backend"
        )


def _shard(context: Context, parallelism: ParallelDims | None) -> Shard:
    """Return this rank's shard: by rank, or by the mesh's data coordinate if several ranks read the same batches."""
    topology = context.topology
    if parallelism is None:
        return Shard(topology.rank, topology.world_size)
    return Shard(*parallelism.plan(topology.world_size).data_shard(topology.rank))


def _readers(context: Context, parallelism: ParallelDims | None) -> tuple[int, ...]:
    world_size = context.topology.world_size
    return tuple(range(world_size)) if parallelism is None else parallelism.plan(world_size).data_readers()


def _as_mapping(section: object) -> Mapping[str, object]:
    if isinstance(section, Mapping):
        return section
    if not is_dataclass(section):
        raise TypeError(
            f"a section is its dataclass or a mapping of its fields, not {type(section).__name__}"
        )
    return {each.name: getattr(section, each.name) for each in fields(section)}
