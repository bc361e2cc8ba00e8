"""The options in `Accelerator(kwargs_handlers=[...])`, those of torch.compile, and their translation."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from datetime import timedelta
from typing import Any, Literal

from torch import profiler
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from drivetrain_accelerate.environment_variables import clear_environment, fill_unsaid, truth
from drivetrain_accelerate.plugins.enums import DDPCommunicationHookType, DynamoBackend
from drivetrain_accelerate.plugins.option_fields import (
    becomes,
    check_refused,
    options,
    refusal,
    refused,
    settings_of,
    without_effect,
)
from drivetrain_config import environ
from drivetrain_state.device_traits import traits_of

_DYNAMO = "ACCELERATE_DYNAMO_"


class KwargsHandler:
    """The base class for dataclasses of options."""

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields."""
        return deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, or are set by an environment variable."""
        with clear_environment():
            default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


@options
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast`."""

    enabled: bool = becomes("run.mixed_precision", default=True)
    cache_enabled: bool | None = becomes("torch.autocast(cache_enabled=)", default=None)


@options
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel` and of its communication hook."""

    dim: int = refused("ddp", "batches are divided along their first dimension; leave it out", default=0)
    broadcast_buffers: bool = becomes("ddp.broadcast_buffers", default=True)
    bucket_cap_mb: int = becomes("ddp.bucket_size_mb", default=25)
    find_unused_parameters: bool = becomes("ddp.find_unused_parameters", default=False)
    check_reduction: bool = without_effect("torch ignores it too", default=False)
    gradient_as_bucket_view: bool = becomes("ddp.gradient_as_bucket_view", default=False)
    static_graph: bool = becomes("ddp.static_graph", default=False)
    comm_hook: DDPCommunicationHookType = becomes(
        "ddp.communication_hook", default=DDPCommunicationHookType.NO
    )
    comm_wrapper: Literal[
        DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16
    ] = refused(
        "ddp.communication_hook", "hooks are not nested; leave it out", default=DDPCommunicationHookType.NO
    )
    comm_state_option: dict[str, Any] = becomes(
        "ddp.power_sgd_rank, ddp.power_sgd_start_step", default_factory=dict[str, Any]
    )

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the options that DDP's constructor takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the hook that `comm_hook` names, so that the model reduces its gradients by it."""
        if self.comm_hook == DDPCommunicationHookType.NO:
            return
        is_power_sgd = self.comm_hook in (
            DDPCommunicationHookType.POWER_SGD,
            DDPCommunicationHookType.BATCHED_POWER_SGD,
        )
        state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if is_power_sgd else None
        hook = _HOOKS[self.comm_hook]
        if self.comm_wrapper != DDPCommunicationHookType.NO:
            hook = _WRAPPERS[self.comm_wrapper](hook)
        model.register_comm_hook(state=state, hook=hook)


_HOOKS: dict[DDPCommunicationHookType, Any] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
    DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
    DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS: dict[DDPCommunicationHookType, Any] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
}


@options
class GradScalerKwargs(KwargsHandler):
    """Options of fp16's loss scale."""

    init_scale: float = becomes("precision.initial_scale", default=65536.0)
    growth_factor: float = becomes("precision.growth_factor", default=2.0)
    backoff_factor: float = becomes("precision.backoff_factor", default=0.5)
    growth_interval: int = becomes("precision.growth_interval", default=2000)
    enabled: bool = refused(
        "precision",
        "fp16 without a loss scale loses small gradients; say mixed_precision='bf16'",
        default=True,
    )


@options
class InitProcessGroupKwargs(KwargsHandler):
    """Options of `torch.distributed.init_process_group`."""

    backend: str | None = refused("state", "only the one that fits the device", default="nccl")
    init_method: str | None = refused(
        "state",
        "processes meet at MASTER_ADDR and MASTER_PORT; leave it out, or make the group before the Accelerator",
        default=None,
    )
    timeout: timedelta | None = becomes("state.timeout_seconds", default=None)


@options
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`."""

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> profiler.profile:
        """Return the profiler; raise a ValueError for an unknown activity."""
        activities = None
        if self.activities is not None:
            known = profiler.ProfilerActivity.__members__
            if unknown := [name for name in self.activities if name.upper() not in known]:
                raise ValueError(
                    f"activities={self.activities!r}: {unknown[0]!r} must be one of "
                    f"{', '.join(map(str.lower, known))}"
                )
            activities = [known[name.upper()] for name in self.activities]
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        schedule = options.pop("schedule_option")
        del options["activities"], options["output_trace_dir"]
        return profiler.profile(
            activities=activities,
            schedule=None if schedule is None else profiler.schedule(**schedule),
            **options,
        )


@options
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile`. Options that are not given come from the environment."""

    backend: DynamoBackend = becomes("torch.compile(backend=)", default=None)
    mode: str = becomes("torch.compile(mode=)", default=None)
    fullgraph: bool = becomes("torch.compile(fullgraph=)", default=None)
    dynamic: bool | None = becomes("torch.compile(dynamic=)", default=None)
    options: Any = becomes("torch.compile(options=)", default=None)
    disable: bool = becomes("torch.compile(disable=)", default=False)
    use_regional_compilation: bool = becomes("compiles_regions()", default=None)

    def __post_init__(self) -> None:
        """Fill the fields; raise a ValueError for an unknown word."""
        fill_unsaid(self, _DYNAMO, backend="no", mode="default", use_regional_compilation=False)
        self.backend = DynamoBackend(str(self.backend).upper())
        fill_unsaid(self, f"{_DYNAMO}USE_", fullgraph=False)
        if self.dynamic is None and (text := environ.read(f"{_DYNAMO}USE_DYNAMIC")) is not None:
            self.dynamic = truth(text, of=f"{_DYNAMO}USE_DYNAMIC")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields, with torch's name of the backend."""
        return {**super().to_dict(), "backend": str(self.backend.value).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from their defaults."""
        found = super().to_kwargs()
        found.pop("use_regional_compilation", None)
        return found


def ddp_sections(handler: DistributedDataParallelKwargs) -> dict[str, object]:
    """Return the fields of the `ddp` section."""
    check_refused(handler)
    section: dict[str, object] = {
        **settings_of(handler),
        "bucket_size_mb": float(handler.bucket_cap_mb),
        # A static graph finds unused parameters by itself.
        "find_unused_parameters": handler.find_unused_parameters and not handler.static_graph,
        "communication_hook": str(handler.comm_hook.value),
    }
    options = dict(handler.comm_state_option)
    if handler.comm_hook == DDPCommunicationHookType.NO:
        section["communication_hook"] = "none"
    elif handler.comm_hook == DDPCommunicationHookType.POWER_SGD:
        section["power_sgd_rank"] = options.pop("matrix_approximation_rank", 1)
        section["power_sgd_start_step"] = options.pop("start_powerSGD_iter", 1000)
    elif handler.comm_hook == DDPCommunicationHookType.BATCHED_POWER_SGD:
        instead = "PowerSGD over whole buckets is less accurate; say POWER_SGD"
        raise refusal(handler, "comm_hook", handler.comm_hook, instead)
    if options:
        instead = "matrix_approximation_rank and start_powerSGD_iter of POWER_SGD are set here; leave the others out"
        raise refusal(handler, "comm_state_option", options, instead)
    return section


def scaler_sections(handler: GradScalerKwargs) -> dict[str, object]:
    """Return the fields of the `precision` section for fp16's loss scale."""
    check_refused(handler)
    section: dict[str, object] = settings_of(handler)
    if handler.init_scale < 1:
        section["min_scale"] = handler.init_scale  # by default the scale does not fall below 1
    return section


def check_group(handler: InitProcessGroupKwargs, device_type: str) -> None:
    """Refuse a process group other than drivetrain's for this kind of device. `PartialState` takes the timeout."""
    own = traits_of(device_type).collectives or "gloo"
    # The default, "nccl", means what fits the device in Accelerate too.
    if handler.backend not in (None, "nccl", own, f"cpu:gloo,{device_type}:{own}"):
        instead = (
            f"processes on {device_type} communicate by {own}; leave it out, or make the group by "
            "torch.distributed.init_process_group before the Accelerator, which takes it"
        )
        raise refusal(handler, "backend", handler.backend, instead)
    if handler.init_method not in (None, "env://"):
        raise refusal(handler, "init_method", handler.init_method)


def check_autocast(handler: AutocastKwargs, mixed_precision: str) -> None:
    """Refuse autocast that is switched off in a run in half precision: models would compute in full precision."""
    if not handler.enabled and mixed_precision != "no":
        instead = (
            f"models would not compute in mixed_precision={mixed_precision!r}; say mixed_precision='no', or pass the "
            "handler to accelerator.autocast() around the part that is computed in full precision"
        )
        raise refusal(handler, "enabled", False, instead)


def compile_options(plugin: TorchDynamoPlugin) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile`; None if nothing is compiled."""
    if plugin.backend == DynamoBackend.NO:
        return None
    options = {name: value for name, value in plugin.to_dict().items() if value is not None}
    del options["use_regional_compilation"]
    if options["mode"] == "default":
        del options["mode"]
    return options


def compiles_regions(plugin: TorchDynamoPlugin) -> bool:
    """Return whether the blocks of a model are compiled one by one."""
    return plugin.backend != DynamoBackend.NO and plugin.use_regional_compilation
