"""The ranks, the precision and the plugins of the first Accelerator, shared in the whole process."""

from collections.abc import Mapping
from importlib import import_module
from logging import getLogger
from types import MappingProxyType
from typing import Any, ClassVar, cast
from weakref import WeakSet

from drivetrain.settings import RunSettings
from drivetrain_accelerate.environment_variables import value_from
from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_accelerate.plugins.kwargs_handlers import TorchDynamoPlugin
from drivetrain_accelerate.plugins.parallelism_handlers import check_dimensions
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_config import resolve

logger = getLogger(__name__)

# The backends that Accelerate has a plugin for, each with the variable that asks for it.
_VARIABLES: Mapping[str, str] = MappingProxyType(
    {"fsdp": "ACCELERATE_USE_FSDP", "deepspeed": "ACCELERATE_USE_DEEPSPEED"}
)
_SHARDING = "fsdp"  # which dimensions that shard imply, where no other of them is asked for
_CLASSES = {"fsdp": "FullyShardedDataParallelPlugin", "deepspeed": "DeepSpeedPlugin"}
_OWN = ("dynamo_plugin", "torch_tp_plugin", "megatron_lm_plugin", "parallelism_config", "fsdp_plugin")
_FORGET = "call AcceleratorState._reset_state(reset_partial_state=True) between two runs"


class AcceleratorState(PartialState):
    """The ranks, precision and plugins of a run. The first Accelerator sets them."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    accelerators: ClassVar[WeakSet[Any]] = WeakSet()  # of this process; a reset leaves them

    deepspeed_plugins: dict[str, Any] | None  # by name
    fsdp_plugin: Any
    dynamo_plugin: Any
    parallelism_config: Any
    device_mesh: Any  # of the parallel dimensions of more than one process
    said_precision: str | None  # by the first Accelerator or its launch
    # Whether drivetrain's settings, and not a plugin, say how models are sharded.
    is_sharding_in_settings: bool

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        given = (dynamo_plugin, torch_tp_plugin, megatron_lm_plugin, parallelism_config, fsdp_plugin)
        plugins = {**dict(zip(_OWN, given, strict=True)), "deepspeed_plugin": deepspeed_plugin}
        if self.initialized:
            self._check_same(mixed_precision, cpu, plugins)
            return
        if not _from_accelerator:
            raise ValueError(
                "AcceleratorState() before any Accelerator(): there is no precision and no plugin yet; construct "
                "`accelerator = Accelerator()` first, or ask PartialState() for the ranks"
            )
        # An error leaves the state as empty as it was.
        ranks = PartialState(cpu, **kwargs)
        is_in_settings = add_unsaid_plugins(
            plugins, num_processes=ranks.num_processes, is_main=ranks.is_main_process
        )
        dimensions, mesh = plugins["parallelism_config"], None
        if dimensions is not None and ranks.num_processes > 1:
            mesh = dimensions.get_device_mesh(ranks.device.type)
        self.__dict__.update(PartialState._shared_state)
        self.is_sharding_in_settings = is_in_settings
        self.said_precision = mixed_precision
        # What was given, not the plugins themselves: a run fills them as it prepares its models.
        self._given = plugins
        self._shown = {name: shown_plugin(plugin) for name, plugin in plugins.items()}
        engine = plugins["deepspeed_plugin"]
        self.deepspeed_plugins = engine if engine is None or isinstance(engine, dict) else {"default": engine}
        for chosen in list((self.deepspeed_plugins or {}).values())[:1]:
            chosen.select(_from_accelerator_state=True)
        self.__dict__.update({name: plugins[name] for name in _OWN})
        self.device_mesh = mesh
        if self.deepspeed_plugins:
            self.distributed_type = DistributedType.DEEPSPEED
        elif self.fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP

    def __getattr__(self, name: str) -> Any:
        # After a reset of what is held here, the ranks and the device are still those of PartialState.
        if name in (ranks := PartialState._shared_state):
            return ranks[name]
        return super().__getattr__(name)

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Forget the precision and the plugins; with `reset_partial_state`, the ranks too."""
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """The precision of forward and backward."""
        return self.said_precision or "no"

    @property
    def scales_loss(self) -> bool:
        """True if losses are scaled before backward, as under fp16."""
        return self.mixed_precision == "fp16"

    @property
    def divides_models(self) -> bool:
        """True if models are divided among ranks."""
        return self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded: drivetrain shards by FSDP2 alone, whatever version the plugin says."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeed plugin; None if there is none."""
        plugins = self.deepspeed_plugins
        if not plugins:
            return None
        return next((each for each in plugins.values() if getattr(each, "selected", True)), None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return a plugin of DeepSpeed by its name."""
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise KeyError(f"{name!r}: the plugins of DeepSpeed are {', '.join(plugins) or 'none'}")
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Select a DeepSpeed plugin by its name; it applies to objects prepared from now on."""
        chosen = self.get_deepspeed_plugin(name or "default")
        for each in (self.deepspeed_plugins or {}).values():
            if each is not chosen:
                each.unselect()
        chosen.select(_from_accelerator_state=True)

    def _check_same(self, mixed_precision: str | None, cpu: bool, plugins: Mapping[str, Any]) -> None:
        """Raise a ValueError if the arguments differ from those of the first Accelerator."""
        for name, given, kept in (
            ("mixed_precision", mixed_precision, self.mixed_precision),
            ("cpu", cpu or None, self._cpu),
        ):
            if given is not None and given != kept:
                raise ValueError(
                    f"{name}={given!r}: the first Accelerator of this process has {kept!r}, and they share a state; "
                    f"say the same, or {_FORGET}"
                )
        for name, plugin in plugins.items():
            if plugin is None or plugin is self._given[name] or shown_plugin(plugin) == self._shown[name]:
                continue
            raise ValueError(
                f"{name}={type(plugin).__name__}(...): the first Accelerator of this process has "
                f"{'none' if self._shown[name] is None else 'another'}, and they share a state: leave it out, or "
                f"{_FORGET}"
            )


def add_unsaid_plugins(plugins: dict[str, Any], *, num_processes: int, is_main: bool) -> bool:
    """Add plugins that parallel dimensions, settings or variables imply; rank 0 warns of ignored variables.

    Return whether drivetrain's settings decide how models are sharded. The plugin then only shows them to programs.
    """
    plugins["dynamo_plugin"] = plugins["dynamo_plugin"] or TorchDynamoPlugin()
    if (older := plugins["torch_tp_plugin"]) is not None:  # few runs wait for the import of device meshes
        module = import_module("drivetrain_accelerate.plugins.parallelism_config")
        plugins["parallelism_config"] = module.dimensions_of(older, plugins["parallelism_config"])
    dimensions = plugins["parallelism_config"]
    if dimensions is not None:
        check_dimensions(dimensions, num_processes=num_processes)
    given = [name for name in _VARIABLES if plugins[f"{name}_plugin"] is not None]
    if given:
        if len(given) > 1:
            asked = " and ".join(f"{name}_plugin=" for name in given)
            raise ValueError(f"{asked}: a run has one backend; pass one")
        for name, variable in _VARIABLES.items():
            if is_main and name not in given and value_from(variable, False):
                logger.warning(
                    "%s=true gives way to %s_plugin= of the program, which comes first: unset the variable, or leave "
                    "the plugin out",
                    variable,
                    given[0],
                )
        return False
    # A backend that drivetrain's settings say comes before Accelerate's variables, which also fill the plugin.
    found = resolve(RunSettings, section="run")
    named = found.value.backend or "auto"
    is_said = found.sources["backend"].kind != "default" and named != "auto"
    asked = [name for name, variable in _VARIABLES.items() if value_from(variable, False)]
    chosen = [named] if is_said else asked
    others = {*chosen} & {*_VARIABLES} - {_SHARDING}
    if dimensions is not None and dimensions.dp_shard_size > 1 and not others:
        plugins |= _make_plugin(_SHARDING, fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        return False
    if not is_said and len(asked) > 1:
        raise ValueError(
            f"{' and '.join(map(_VARIABLES.__getitem__, asked))} are both true, and a run has one backend: unset "
            "one of them, or pass the plugin of the one you mean"
        )
    for backend in chosen:
        plugins |= _make_plugin(backend) if backend in _VARIABLES else {}
    return is_said and named in _VARIABLES


def _make_plugin(backend: str, **fields: Any) -> dict[str, Any]:
    # torch's FSDP takes seconds to import: only a run that asks for it does.
    module = import_module(f"drivetrain_accelerate.plugins.{backend}_plugin")
    return {f"{backend}_plugin": getattr(module, _CLASSES[backend])(**fields)}


def shown_plugin(plugin: Any) -> str | None:
    """Return a plugin's options (or several plugins') as a text, equal for equal options and after later use.

    A text compares better: some options, such as partial functions, are never equal to a copy.
    """
    if plugin is None:
        return None
    if isinstance(plugin, Mapping):
        named = cast("Mapping[str, Any]", plugin)
        return repr({name: shown_plugin(each) for name, each in named.items()})
    said = {
        name: value
        for name, value in vars(plugin).items()
        if not name.startswith("_")
        and name not in ("hf_ds_config", "dschf", "device_mesh")  # made of the others, or noted in use
    }
    return f"{type(plugin).__name__}: {said!r}"
