"""The ranks, the precision and the plugins of the first Accelerator, shared by all that ask."""

from collections.abc import Mapping
from typing import Any, ClassVar
from weakref import WeakSet

from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_accelerate.plugins.launched_plugin import add_unsaid_plugins, shown_plugin
from drivetrain_accelerate.states.partial_state import PartialState

_OWN = ("dynamo_plugin", "torch_tp_plugin", "megatron_lm_plugin", "parallelism_config", "fsdp_plugin")
_FORGET = "call AcceleratorState._reset_state(reset_partial_state=True) between two runs"


class AcceleratorState(PartialState):
    """The ranks, precision and plugins of a run. The first Accelerator sets them.

    Attributes:
        deepspeed_plugins: The plugins of DeepSpeed by name; None without.
        device_mesh: The mesh of the parallel dimensions of more than one process; None without.
        is_sharding_in_settings: Whether drivetrain's settings, and not a plugin, say how models are sharded.
        accelerators: The Accelerators of this process, as far as the program holds them; a reset leaves them.
        said_precision: The precision that the first Accelerator or its launch says; None if neither does.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    accelerators: ClassVar[WeakSet[Any]] = WeakSet()

    deepspeed_plugins: dict[str, Any] | None
    fsdp_plugin: Any
    dynamo_plugin: Any
    parallelism_config: Any
    device_mesh: Any
    said_precision: str | None
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
        """Forget the precision and the plugins, and the ranks too if that is asked for."""
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
        """True if models are divided among ranks, so that one cannot stay whole."""
        return self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded: drivetrain shards by FSDP2 alone, whatever version the plugin says."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def deepspeed_plugin(self) -> Any:
        """The plugin of DeepSpeed that is selected; None without one."""
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
        """Select a plugin of DeepSpeed by its name, for what is prepared from now on."""
        chosen = self.get_deepspeed_plugin(name or "default")
        for each in (self.deepspeed_plugins or {}).values():
            if each is not chosen:
                each.unselect()
        chosen.select(_from_accelerator_state=True)

    def _check_same(self, mixed_precision: str | None, cpu: bool, plugins: Mapping[str, Any]) -> None:
        """Refuse what the first Accelerator does not have."""
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
