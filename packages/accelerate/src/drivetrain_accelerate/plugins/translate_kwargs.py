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
from drivetrain_accelerate.plugins.option_fields import check_refused, refusal, settings_of
from drivetrain_accelerate.plugins.run_configuration import DataLoaderConfiguration, ProjectConfiguration

# Each kind of device's library that communicates; others have gloo.
_COMMUNICATES_BY = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl", "mlu": "cncl"}


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
    """Return the fields of the `precision` section that say how fp16's loss scale moves."""
    check_refused(handler)
    section: dict[str, object] = settings_of(handler)
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
        instead = (
            f"processes on {device_type} communicate by {own}; leave it out, or make the group by "
            "torch.distributed.init_process_group before the Accelerator, which takes it"
        )
        raise refusal(handler, "backend", handler.backend, instead)
    if handler.init_method not in (None, "env://"):
        raise refusal(handler, "init_method", handler.init_method)


def check_autocast(handler: AutocastKwargs, mixed_precision: str) -> None:
    """Refuse a run in half precision whose models would not compute in it, since autocast is off."""
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


def data_sections(configuration: DataLoaderConfiguration) -> dict[str, object]:
    """Return the fields of the `data` section.

    `even_batches` fills the tail from the epoch's beginning, and `gather_for_metrics` leaves what was filled in out;
    drivetrain's "pad" does both. Without it, no sample is repeated, and ranks stay in step.
    """
    return {**settings_of(configuration), "even": "pad" if configuration.even_batches else "uneven"}


def check_project(configuration: ProjectConfiguration) -> None:
    """Refuse options of a project about checkpoints that would have no effect."""
    check_refused(configuration)
    limit = configuration.total_limit
    if limit is not None and not configuration.automatic_checkpoint_naming:
        instead = (
            "old checkpoints are known by their automatic names; say automatic_checkpoint_naming=True too"
        )
        raise refusal(configuration, "total_limit", limit, instead)
    if limit is not None and limit < 1:
        instead = "it would delete the checkpoint that was just written; say 1 or more, or None to keep all"
        raise refusal(configuration, "total_limit", limit, instead)
