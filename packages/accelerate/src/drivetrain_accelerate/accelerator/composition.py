"""Make drivetrain's Accelerator from the arguments of Accelerate's: plan the settings, then compose.

The plan of a run shows the source of each setting.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from drivetrain import Accelerator
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.environment_variables import is_same_word
from drivetrain_accelerate.plugins.deepspeed_plugin import (
    deepspeed_accumulation,
    deepspeed_precision_sections,
    deepspeed_sections,
)
from drivetrain_accelerate.plugins.fp8_recipes import check_fp8_precision, fp8_recipe
from drivetrain_accelerate.plugins.kwargs_handlers import (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    check_autocast,
    ddp_sections,
    scaler_sections,
)
from drivetrain_accelerate.plugins.parallelism_handlers import (
    GATHERED,
    check_engine_dimensions,
    parallel_sizes,
    parallelism_sections,
)
from drivetrain_accelerate.plugins.run_configuration import (
    DataLoaderConfiguration,
    check_project,
    data_sections,
)
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.states.partial_state import asks_for_cpu
from drivetrain_config import Source, environ
from drivetrain_config import sections as installed_sections
from drivetrain_config.source import Entry
from drivetrain_precision import Fp8Recipe
from drivetrain_state import best_device_kind

PROGRAM = Source("code")
# What Accelerate does where a program says nothing, although drivetrain's own default is another. What the launch
# says comes before it.
UNSAID = Source("default", "Accelerate's default")
# Of the checkpoints in one folder of `save_state`, not of those folders; what the launch says overrules it.
ONE_IN_A_FOLDER = Source("default", "as in Accelerate, save_state replaces the checkpoint in its folder")
FSDP_PLUGIN = Source("code", "the FSDP plugin")
DEEPSPEED_PLUGIN = Source("code", "the DeepSpeed plugin")


@dataclass(frozen=True, slots=True)
class SourcedSettings:
    """Settings by section and field, with the source of each by "section.field"."""

    sections: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])
    sources: dict[str, Source] = field(default_factory=dict[str, Source])

    def add(
        self,
        section: str,
        given: Mapping[str, object],
        source: Source = PROGRAM,
        *,
        unsaid: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Add or replace settings of a section; a value equal to that in `unsaid` counts as Accelerate's default."""
        for name, value in given.items():
            is_unsaid = name in unsaid and unsaid[name] == value
            self.sections.setdefault(section, {})[name] = value
            self.sources[f"{section}.{name}"] = UNSAID if is_unsaid else source

    def entries(self) -> dict[str, dict[str, Entry]]:
        """Return the settings as drivetrain takes them, without Accelerate's defaults that equal drivetrain's."""
        known = installed_sections(only=self.sections)
        found: dict[str, dict[str, Entry]] = {}
        for section, values in self.sections.items():
            defaults = {each.name: each.default for each in fields(known[section])}
            entries = {
                name: Entry(value, self.sources[f"{section}.{name}"])
                for name, value in values.items()
                if value is not None
            }
            found[section] = {
                name: entry
                for name, entry in entries.items()
                if entry.source != UNSAID or entry.value != defaults[name]
            }
        return found


def compose(
    options: RunOptions, state: AcceleratorState, *, num_micro_batches: int, is_strict: bool = True
) -> Accelerator:
    """Return drivetrain's Accelerator for a run; a TranslationError refuses an option. Called on all ranks."""
    shared = replace(
        options,
        mixed_precision=state.said_precision,
        accumulation=replace(options.accumulation, num_steps=num_micro_batches),
        fsdp_plugin=state.fsdp_plugin,
        parallelism_config=state.parallelism_config,
    )
    settings = plan_composition(
        shared,
        deepspeed_plugin=state.deepspeed_plugin,
        num_processes=state.num_processes,
        is_sharding_in_settings=state.is_sharding_in_settings,
        is_strict=is_strict,
    )
    if state.device.type == "cpu" and (options.cpu or asks_for_cpu() or best_device_kind() != "cpu"):
        source = PROGRAM if options.cpu else source_of(True, "ACCELERATE_USE_CPU")
        settings.add("run", {"cpu": True}, source)
    return Accelerator(
        fp8_recipe=_fp8_recipe(shared),
        project_dir=options.project.logging_dir,
        log_with=list(options.log_with) or None,
        sections=settings.entries(),
    )


def plan_composition(
    options: RunOptions,
    *,
    deepspeed_plugin: Any,
    num_processes: int,
    is_sharding_in_settings: bool = False,
    is_strict: bool = True,
) -> SourcedSettings:
    """Return the settings of drivetrain's Accelerator."""
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
    if options.parallelism_config is not None:
        if deepspeed_plugin is not None:
            check_engine_dimensions(options.parallelism_config)
        sizes = parallel_sizes(options.parallelism_config, partitions_all=deepspeed_plugin is not None)
        settings.add("parallel", sizes, unsaid={"context_method": GATHERED})
    return settings


def _fp8_recipe(options: RunOptions) -> Fp8Recipe | None:
    """Return the recipe that the program gives; without one, fp8 takes the default recipe."""
    given: Any = options.handlers.fp8
    check_fp8_precision(given, options.mixed_precision)  # a program may have set it since
    return None if given is None else fp8_recipe(given, is_sharded=options.fsdp_plugin is not None)


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
    from drivetrain_accelerate.plugins.translate_fsdp import (
        fsdp_model_section,
        fsdp_precision_sections,
        fsdp_sections,
    )

    plugin, precision = options.fsdp_plugin, options.mixed_precision or "no"
    settings.add("run", {"backend": "fsdp"}, FSDP_PLUGIN)
    if not is_in_settings:
        sharded = fsdp_sections(plugin)
        settings.add("fsdp", sharded, FSDP_PLUGIN)
        settings.add("model", fsdp_model_section(plugin, sharded), FSDP_PLUGIN)
    settings.add("precision", fsdp_precision_sections(plugin, precision, is_strict=is_strict), FSDP_PLUGIN)
    if options.parallelism_config is not None:
        settings.add("fsdp", parallelism_sections(options.parallelism_config), FSDP_PLUGIN)


def source_of(value: object, variable: str) -> Source:
    """Return a value's source: an environment variable if that has the same value, or else the program."""
    text = environ.read(variable)
    is_said = text is not None and is_same_word(text, str(value))
    return Source("environment", variable) if is_said else PROGRAM
