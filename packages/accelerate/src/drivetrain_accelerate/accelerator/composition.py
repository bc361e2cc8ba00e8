"""Make drivetrain's Accelerator out of the arguments of Accelerate's: plan its settings, then compose it."""

from dataclasses import dataclass, replace
from typing import Any

from drivetrain import Accelerator
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.plugins.translate_deepspeed import (
    deepspeed_precision_sections,
    deepspeed_sections,
)
from drivetrain_accelerate.plugins.translate_fp8 import fp8_recipe
from drivetrain_accelerate.plugins.translate_kwargs import (
    check_autocast,
    check_project,
    data_sections,
    ddp_sections,
    scaler_sections,
)
from drivetrain_accelerate.plugins.translate_parallelism import check_engine_dimensions, parallelism_sections
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_precision import Fp8Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositionPlan:
    """The arguments of drivetrain's Accelerator for a run.

    Attributes:
        backend: The name of the backend; None for what the launch says.
        num_micro_batches: The number of micro-batches in one optimizer step.
        fp8_recipe: The recipe of fp8; None for the default one, or in other precisions.
        sections: The settings by section.
    """

    backend: str | None
    num_micro_batches: int
    fp8_recipe: Fp8Recipe | None
    sections: dict[str, dict[str, object]]


def compose(
    options: RunOptions, state: AcceleratorState, *, num_micro_batches: int, is_strict: bool = True
) -> Accelerator:
    """Return the Accelerator that carries a run out. Called on all ranks.

    Args:
        options: The arguments of the program.
        state: The state that all Accelerators share, which says precision, device and plugins for all of them.
        num_micro_batches: The number of micro-batches in one optimizer step.
        is_strict: Whether what Accelerate does wrong without a word is put right.

    Raises:
        TranslationError: An option cannot be honoured; the message says what to do instead.
    """
    shared = replace(
        options,
        mixed_precision=state.said_precision,
        cpu=state.device.type == "cpu",
        accumulation=replace(options.accumulation, num_steps=num_micro_batches),
        fsdp_plugin=state.fsdp_plugin,
        parallelism_config=state.parallelism_config,
    )
    plan = plan_composition(
        shared,
        deepspeed_plugin=state.deepspeed_plugin,
        num_processes=state.num_processes,
        is_sharding_in_settings=state.is_sharding_in_settings,
        is_strict=is_strict,
    )
    mode: Any = shared.mixed_precision
    return Accelerator(
        mixed_precision=mode,
        fp8_recipe=plan.fp8_recipe,
        backend=plan.backend,
        gradient_accumulation_steps=plan.num_micro_batches,
        project_dir=options.project.logging_dir,
        log_with=list(options.log_with) or None,
        cpu=shared.cpu or None,
        sections=plan.sections,
    )


def plan_composition(
    options: RunOptions,
    *,
    deepspeed_plugin: Any,
    num_processes: int,
    is_sharding_in_settings: bool = False,
    is_strict: bool = True,
) -> CompositionPlan:
    """Return the arguments of drivetrain's Accelerator.

    Args:
        options: The arguments of the program, with what all Accelerators share.
        deepspeed_plugin: The selected plugin of DeepSpeed; None without.
        num_processes: The number of ranks.
        is_sharding_in_settings: Whether drivetrain's settings say how models are sharded, of which a plugin of FSDP
            is then a view for programs.
        is_strict: Whether what Accelerate does wrong without a word is put right.

    Raises:
        TranslationError: An option cannot be honoured; the message says what to do instead.
    """
    handlers, fsdp = options.handlers, options.fsdp_plugin
    check_project(options.project)
    if handlers.autocast is not None:
        check_autocast(handlers.autocast, options.mixed_precision or "no")
    num_micro_batches, backend = options.accumulation.num_steps or 1, None
    precision: dict[str, object] = {} if handlers.scaler is None else scaler_sections(handlers.scaler)
    if options.mixed_precision in ("fp16", "bf16") and deepspeed_plugin is None:
        precision["output_dtype"] = "fp32"  # so that losses outside the model are computed in full precision
    data = data_sections(options.data)
    if num_processes == 1:
        data["even"] = "uneven"  # one process has no others to keep in step with
    # A second save into a folder replaces the first.
    sections: dict[str, dict[str, object]] = {"data": data, "checkpoint": {"keep_last": 1}}
    if handlers.ddp is not None:
        sections["ddp"] = ddp_sections(handlers.ddp)
    if fsdp is not None:
        # torch's FSDP and device meshes take seconds to import: only a run that asks for them does.
        from drivetrain_accelerate.plugins.translate_fsdp import fsdp_precision_sections, fsdp_sections

        backend = "fsdp"
        if not is_sharding_in_settings:
            sections["fsdp"] = fsdp_sections(fsdp)
        precision |= fsdp_precision_sections(fsdp, options.mixed_precision or "no", is_strict=is_strict)
    elif deepspeed_plugin is not None:
        backend, sections["deepspeed"] = "deepspeed", deepspeed_sections(deepspeed_plugin)
        precision |= deepspeed_precision_sections(deepspeed_plugin)
        check_engine_dimensions(options.parallelism_config)
    if options.parallelism_config is not None and fsdp is not None:
        sections["fsdp"] = {**sections.get("fsdp", {}), **parallelism_sections(options.parallelism_config)}
    if precision:
        sections["precision"] = precision
    recipe: Any = handlers.fp8 if options.mixed_precision == "fp8" else None
    return CompositionPlan(
        backend=backend,
        num_micro_batches=num_micro_batches,
        fp8_recipe=None if recipe is None else fp8_recipe(recipe),
        sections=sections,
    )
