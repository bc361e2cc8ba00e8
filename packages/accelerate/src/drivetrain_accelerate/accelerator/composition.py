"""Make drivetrain's Accelerator out of the arguments of Accelerate's: plan its settings, then compose it."""

from dataclasses import dataclass, replace
from typing import Any

from drivetrain import Accelerator
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.accelerator.sourced_settings import (
    DEEPSPEED_PLUGIN,
    FSDP_PLUGIN,
    ONE_IN_A_FOLDER,
    PROGRAM,
    UNSAID,
    SourcedSettings,
    source_of,
)
from drivetrain_accelerate.plugins.kwargs_handlers import DistributedDataParallelKwargs, GradScalerKwargs
from drivetrain_accelerate.plugins.run_configuration import DataLoaderConfiguration
from drivetrain_accelerate.plugins.translate_deepspeed import (
    deepspeed_accumulation,
    deepspeed_precision_sections,
    deepspeed_sections,
)
from drivetrain_accelerate.plugins.translate_fp8 import check_fp8_precision, fp8_recipe
from drivetrain_accelerate.plugins.translate_kwargs import (
    check_autocast,
    check_project,
    data_sections,
    ddp_sections,
    scaler_sections,
)
from drivetrain_accelerate.plugins.translate_parallelism import check_engine_dimensions, parallelism_sections
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.states.partial_state import asks_for_cpu
from drivetrain_precision import Fp8Recipe
from drivetrain_state import best_device_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositionPlan:
    """The arguments of drivetrain's Accelerator for a run; without a recipe, fp8 takes the default one."""

    fp8_recipe: Fp8Recipe | None
    settings: SourcedSettings


def compose(
    options: RunOptions, state: AcceleratorState, *, num_micro_batches: int, is_strict: bool = True
) -> Accelerator:
    """Return the Accelerator that carries a run out. Called on all ranks.

    Raises:
        TranslationError: An option cannot be honoured; the message says what to do instead.
    """
    shared = replace(
        options,
        mixed_precision=state.said_precision,
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
    if state.device.type == "cpu" and (options.cpu or asks_for_cpu() or best_device_kind() != "cpu"):
        source = PROGRAM if options.cpu else source_of(True, "ACCELERATE_USE_CPU")
        plan.settings.add("run", {"cpu": True}, source)
    return Accelerator(
        fp8_recipe=plan.fp8_recipe,
        project_dir=options.project.logging_dir,
        log_with=list(options.log_with) or None,
        sections=plan.settings.entries(),
    )


def plan_composition(
    options: RunOptions,
    *,
    deepspeed_plugin: Any,
    num_processes: int,
    is_sharding_in_settings: bool = False,
    is_strict: bool = True,
) -> CompositionPlan:
    """Return the arguments of drivetrain's Accelerator."""
    check_project(options.project)
    settings = SourcedSettings()
    _add_run(settings, options, deepspeed_plugin)
    data, unsaid = data_sections(options.data), data_sections(DataLoaderConfiguration())
    if num_processes == 1:
        data["even"] = unsaid["even"] = "uneven"  # one process has no others to keep in step with
    settings.add("data", data, unsaid=unsaid)
    settings.add("checkpoint", {"keep_last": 1}, ONE_IN_A_FOLDER)
    _add_handlers(settings, options, casts_outputs=deepspeed_plugin is None)
    if options.fsdp_plugin is not None:
        _add_fsdp(settings, options, is_in_settings=is_sharding_in_settings, is_strict=is_strict)
    elif deepspeed_plugin is not None:
        settings.add("run", {"backend": "deepspeed"}, DEEPSPEED_PLUGIN)
        settings.add("deepspeed", deepspeed_sections(deepspeed_plugin), DEEPSPEED_PLUGIN)
        settings.add("precision", deepspeed_precision_sections(deepspeed_plugin), DEEPSPEED_PLUGIN)
        check_engine_dimensions(options.parallelism_config)
    recipe: Any = options.handlers.fp8
    check_fp8_precision(recipe, options.mixed_precision)  # a program may have set it since
    is_sharded = options.fsdp_plugin is not None
    found = None if recipe is None else fp8_recipe(recipe, is_sharded=is_sharded)
    return CompositionPlan(fp8_recipe=found, settings=settings)


def _add_run(settings: SourcedSettings, options: RunOptions, deepspeed_plugin: Any) -> None:
    precision, num_steps = options.mixed_precision, options.accumulation.num_steps
    num_steps = 1 if num_steps is None else num_steps
    if precision is not None:
        settings.add(
            "run", {"mixed_precision": precision}, source_of(precision, "ACCELERATE_MIXED_PRECISION")
        )
    source = UNSAID if num_steps == 1 else source_of(num_steps, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if deepspeed_plugin is not None and deepspeed_accumulation(deepspeed_plugin) == num_steps:
        source = DEEPSPEED_PLUGIN
    settings.add("run", {"gradient_accumulation_steps": num_steps}, source)


def _add_handlers(settings: SourcedSettings, options: RunOptions, *, casts_outputs: bool) -> None:
    handlers = options.handlers
    if handlers.autocast is not None:
        check_autocast(handlers.autocast, options.mixed_precision or "no")
    unsaid = ddp_sections(DistributedDataParallelKwargs())
    settings.add("ddp", unsaid if handlers.ddp is None else ddp_sections(handlers.ddp), unsaid=unsaid)
    if handlers.scaler is not None:
        settings.add(
            "precision", scaler_sections(handlers.scaler), unsaid=scaler_sections(GradScalerKwargs())
        )
    if casts_outputs and options.mixed_precision in ("fp16", "bf16"):
        # So that losses outside the model are computed in full precision.
        settings.add("precision", {"output_dtype": "fp32"}, UNSAID)


def _add_fsdp(
    settings: SourcedSettings, options: RunOptions, *, is_in_settings: bool, is_strict: bool
) -> None:
    # torch's FSDP and device meshes take seconds to import: only a run that asks for them does.
    from drivetrain_accelerate.plugins.translate_fsdp import fsdp_precision_sections, fsdp_sections

    plugin, precision = options.fsdp_plugin, options.mixed_precision or "no"
    settings.add("run", {"backend": "fsdp"}, FSDP_PLUGIN)
    if not is_in_settings:
        settings.add("fsdp", fsdp_sections(plugin), FSDP_PLUGIN)
    settings.add("precision", fsdp_precision_sections(plugin, precision, is_strict=is_strict), FSDP_PLUGIN)
    if options.parallelism_config is not None:
        settings.add("fsdp", parallelism_sections(options.parallelism_config), FSDP_PLUGIN)
