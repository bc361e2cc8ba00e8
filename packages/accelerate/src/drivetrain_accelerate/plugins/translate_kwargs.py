"""Drivetrain's settings for the options that `Accelerator` takes beside a backend's."""

from typing import Any

from drivetrain_accelerate.plugins.enums import DDPCommunicationHookType, DynamoBackend
from drivetrain_accelerate.plugins.kwargs_handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from drivetrain_accelerate.plugins.run_configuration import DataLoaderConfiguration, ProjectConfiguration
from drivetrain_accelerate.plugins.translation import Fields

DDP_FIELDS = Fields(
    owner="DistributedDataParallelKwargs",
    translated={
        "broadcast_buffers": "ddp.broadcast_buffers",
        "bucket_cap_mb": "ddp.bucket_size_mb",
        "find_unused_parameters": "ddp.find_unused_parameters",
        "gradient_as_bucket_view": "ddp.gradient_as_bucket_view",
        "static_graph": "ddp.static_graph",
        "comm_hook": "ddp.communication_hook",
        "comm_state_option": "ddp.power_sgd_rank, ddp.power_sgd_start_step",
    },
    refused={
        "dim": ("ddp", "batches are divided along their first dimension; leave it out"),
        "comm_wrapper": ("ddp.communication_hook", "hooks are not nested; leave it out"),
    },
    without_effect={"check_reduction": "torch ignores it too"},
)
SCALER_FIELDS = Fields(
    owner="GradScalerKwargs",
    translated={
        "init_scale": "precision.initial_scale",
        "growth_factor": "precision.growth_factor",
        "backoff_factor": "precision.backoff_factor",
        "growth_interval": "precision.growth_interval",
    },
    refused={
        "enabled": (
            "precision",
            "fp16 without a loss scale loses small gradients; say mixed_precision='bf16'",
        )
    },
)
GROUP_FIELDS = Fields(
    owner="InitProcessGroupKwargs",
    translated={"timeout": "state.timeout_seconds"},
    refused={
        "backend": (
            "state",
            "leave it out, or make the group by torch.distributed.init_process_group before the Accelerator, which "
            "takes it",
        ),
        "init_method": (
            "state",
            "processes meet at MASTER_ADDR and MASTER_PORT; leave it out, or make the group before the Accelerator",
        ),
    },
)
AUTOCAST_FIELDS = Fields(
    owner="AutocastKwargs",
    translated={"enabled": "run.mixed_precision", "cache_enabled": "torch.autocast(cache_enabled=)"},
)
COMPILE_FIELDS = Fields(
    owner="TorchDynamoPlugin",
    translated={
        **{
            name: f"torch.compile({name}=)"
            for name in ("backend", "mode", "fullgraph", "dynamic", "options", "disable")
        },
        "use_regional_compilation": "compiles_regions()",
    },
)
DATA_FIELDS = Fields(
    owner="DataLoaderConfiguration",
    translated={
        "split_batches": "data.split_batches",
        "dispatch_batches": "data.dispatch",
        "even_batches": "data.even",
        "data_seed": "data.seed",
        "non_blocking": "data.non_blocking",
    },
    without_effect={
        "use_seedable_sampler": "an order always follows from a seed and the epoch",
        "use_stateful_dataloader": "prepared loaders always have state_dict",
    },
)
PROJECT_FIELDS = Fields(
    owner="ProjectConfiguration",
    translated={
        "project_dir": "save_state(): the folder around `checkpoints`",
        "automatic_checkpoint_naming": "save_state(): the names of folders",
        "total_limit": "checkpoint.keep_last",
    },
    refused={
        "save_on_each_node": (
            "checkpoint.directory",
            "a checkpoint is one folder that all nodes see; leave it out, and name a shared folder or a URL",
        )
    },
    without_effect={
        "logging_dir": "trackers get it from the program's tracker, not from settings",
        "iteration": "the number of the next checkpoint, which the Accelerator counts",
    },
)
ACCUMULATION_FIELDS = Fields(
    owner="GradientAccumulationPlugin",
    translated={
        "num_steps": "run.gradient_accumulation_steps",
        "adjust_scheduler": "AcceleratedScheduler: its steps in an open window",
        "sync_with_dataloader": "accumulate(last=)",
    },
    without_effect={
        "sync_each_batch": "the sum over a window is the same, reduced once; to hold less under FSDP, take smaller "
        "micro-batches or offload"
    },
)
# Each kind of device's library that communicates; others have gloo.
_COMMUNICATES_BY = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl", "mlu": "cncl"}


def ddp_sections(handler: DistributedDataParallelKwargs) -> dict[str, object]:
    """Return the fields of the `ddp` section."""
    DDP_FIELDS.check(handler)
    section: dict[str, object] = {
        **DDP_FIELDS.settings(handler),
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
        raise DDP_FIELDS.refusal("comm_hook", handler.comm_hook, instead)
    if options:
        instead = "matrix_approximation_rank and start_powerSGD_iter of POWER_SGD are set here; leave the others out"
        raise DDP_FIELDS.refusal("comm_state_option", options, instead)
    return section


def scaler_sections(handler: GradScalerKwargs) -> dict[str, object]:
    """Return the fields of the `precision` section that say how fp16's loss scale moves."""
    SCALER_FIELDS.check(handler)
    section: dict[str, object] = SCALER_FIELDS.settings(handler)
    if handler.init_scale < 1:
        section["min_scale"] = handler.init_scale  # by default the scale does not fall below 1
    return section


def check_group(handler: InitProcessGroupKwargs, device_type: str) -> None:
    """Refuse a process group that would be another one than drivetrain's on that kind of device.

    `PartialState` takes its timeout.
    """
    own = _COMMUNICATES_BY.get(device_type, "gloo")
    # The default, "nccl", means what fits the device in Accelerate too.
    if handler.backend not in (None, "nccl", own, f"cpu:gloo,{device_type}:{own}"):
        _, instead = GROUP_FIELDS.refused["backend"]
        instead = f"processes on {device_type} communicate by {own}; {instead}"
        raise GROUP_FIELDS.refusal("backend", handler.backend, instead)
    if handler.init_method not in (None, "env://"):
        raise GROUP_FIELDS.refusal("init_method", handler.init_method)


def check_autocast(handler: AutocastKwargs, mixed_precision: str) -> None:
    """Refuse a run in half precision whose models would not compute in it, since autocast is off."""
    if not handler.enabled and mixed_precision != "no":
        instead = (
            f"models would not compute in mixed_precision={mixed_precision!r}; say mixed_precision='no', or pass the "
            "handler to accelerator.autocast() around the part that is computed in full precision"
        )
        raise AUTOCAST_FIELDS.refusal("enabled", False, instead)


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


def data_sections(configuration: DataLoaderConfiguration) -> dict[str, object]:
    """Return the fields of the `data` section.

    `even_batches` fills the tail from the epoch's beginning, and `gather_for_metrics` leaves what was filled in out;
    drivetrain's "pad" does both. Without it, no sample is repeated, and ranks stay in step.
    """
    return {**DATA_FIELDS.settings(configuration), "even": "pad" if configuration.even_batches else "uneven"}


def check_project(configuration: ProjectConfiguration) -> None:
    """Refuse options of a project about checkpoints that would have no effect."""
    PROJECT_FIELDS.check(configuration)
    limit = configuration.total_limit
    if limit is not None and not configuration.automatic_checkpoint_naming:
        instead = (
            "old checkpoints are known by their automatic names; say automatic_checkpoint_naming=True too"
        )
        raise PROJECT_FIELDS.refusal("total_limit", limit, instead)
    if limit is not None and limit < 1:
        instead = "it would delete the checkpoint that was just written; say 1 or more, or None to keep all"
        raise PROJECT_FIELDS.refusal("total_limit", limit, instead)
