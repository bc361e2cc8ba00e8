"""Make drivetrain's Accelerator out of what a program says in Accelerate's words."""

from typing import Any

from drivetrain import Accelerator
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.plugins.enums import DDPCommunicationHookType
from drivetrain_accelerate.plugins.kwargs_handlers import DistributedDataParallelKwargs, GradScalerKwargs
from drivetrain_accelerate.plugins.run_configuration import DataLoaderConfiguration

Section = dict[str, object]


def compose(options: RunOptions, num_processes: int) -> Accelerator:
    """Return the Accelerator that carries a run out. Called on all ranks."""
    sections: dict[str, object] = {
        "data": data_section(options.data, num_processes),
        "checkpoint": {"keep_last": 1},  # a second save into a folder replaces the first
    }
    if options.handlers.ddp is not None:
        sections["ddp"] = ddp_section(options.handlers.ddp)
    if options.handlers.scaler is not None:
        sections["precision"] = scaler_section(options.handlers.scaler)
    mode: Any = options.mixed_precision
    return Accelerator(
        mixed_precision=mode,
        gradient_accumulation_steps=options.accumulation.num_steps or 1,
        project_dir=options.project.logging_dir,
        log_with=list(options.log_with) or None,
        cpu=options.cpu or None,
        sections=sections,
    )


def data_section(configuration: DataLoaderConfiguration, num_processes: int) -> Section:
    """Return the `data` section of a configuration.

    `even_batches` promises batches of one size on all processes, which programs rely on where they exchange tensors
    themselves: the tail is filled with repeats, which `gather_for_metrics` leaves out. One process has no others to
    keep in step with.
    """
    return {
        "split_batches": configuration.split_batches,
        "dispatch": configuration.dispatch_batches,
        "even": "pad" if configuration.even_batches and num_processes > 1 else "uneven",
        "seed": configuration.data_seed,
        "non_blocking": configuration.non_blocking,
    }


def ddp_section(handler: DistributedDataParallelKwargs) -> Section:
    """Return the `ddp` section of a handler.

    Raises:
        ValueError: The handler says what drivetrain's DDP has no counterpart for.
    """
    hooks = {
        DDPCommunicationHookType.NO: "none",
        DDPCommunicationHookType.FP16: "fp16",
        DDPCommunicationHookType.BF16: "bf16",
        DDPCommunicationHookType.POWER_SGD: "power_sgd",
    }
    hook = DDPCommunicationHookType(handler.comm_hook)
    if hook not in hooks or DDPCommunicationHookType(handler.comm_wrapper) != DDPCommunicationHookType.NO:
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={handler.comm_hook}, comm_wrapper={handler.comm_wrapper}): "
            f"drivetrain has the hooks {', '.join(map(str, hooks))}, without a wrapper"
        )
    return {
        "broadcast_buffers": handler.broadcast_buffers,
        "bucket_size_mb": float(handler.bucket_cap_mb),
        "find_unused_parameters": handler.find_unused_parameters,
        "static_graph": handler.static_graph,
        "communication_hook": hooks[hook],
    }


def scaler_section(handler: GradScalerKwargs) -> Section:
    """Return the part of the `precision` section that a handler says."""
    return {
        "initial_scale": handler.init_scale,
        "growth_factor": handler.growth_factor,
        "backoff_factor": handler.backoff_factor,
        "growth_interval": handler.growth_interval,
    }
