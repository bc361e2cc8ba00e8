"""The arguments of an Accelerator as one value, checked and sorted by purpose."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain_accelerate.plugins.enums import PrecisionType
from drivetrain_accelerate.plugins.kwargs_handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from drivetrain_accelerate.plugins.run_configuration import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from drivetrain_config import environ

_PRECISIONS = tuple(PrecisionType.list())


@dataclass(kw_only=True)
class Handlers:
    """The handlers given to an Accelerator, at most one of each kind."""

    autocast: AutocastKwargs | None = None
    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    init: InitProcessGroupKwargs | None = None
    profile: ProfileKwargs | None = None
    fp8: KwargsHandler | None = None


@dataclass(kw_only=True)
class RunOptions:
    """The arguments of an Accelerator. The program may change the plugins until it prepares its model."""

    mixed_precision: str | None = None  # None if neither the program nor the launch says one
    cpu: bool = False
    data: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    accumulation: GradientAccumulationPlugin = field(default_factory=GradientAccumulationPlugin)
    handlers: Handlers = field(default_factory=Handlers)
    deepspeed_plugin: Any = None  # one, or several by name
    fsdp_plugin: Any = None
    dynamo_plugin: Any = None
    torch_tp_plugin: Any = None
    parallelism_config: Any = None
    log_with: Sequence[Any] = ()
    step_scheduler_with_optimizer: bool = True


def sort_handlers(given: Sequence[KwargsHandler] | None) -> Handlers:
    """Return the given handlers by kind; a ValueError refuses two of one kind."""
    found = Handlers()
    places: dict[type[Any], str] = {
        AutocastKwargs: "autocast",
        DistributedDataParallelKwargs: "ddp",
        GradScalerKwargs: "scaler",
        InitProcessGroupKwargs: "init",
        ProfileKwargs: "profile",
    }
    for handler in given or ():
        if not isinstance(handler, KwargsHandler):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
            raise ValueError(
                f"kwargs_handlers: {handler!r} is no handler; pass objects such as DistributedDataParallelKwargs(...)"
            )
        name = next((place for kind, place in places.items() if isinstance(handler, kind)), "fp8")
        if getattr(found, name) is not None:
            raise ValueError(f"kwargs_handlers: {type(handler).__name__} comes twice; pass one of each kind")
        setattr(found, name, handler)
    return found


def chosen_precision(mixed_precision: PrecisionType | str | None) -> str | None:
    """Return the precision as a plain word; without an argument, the launch's."""
    said = environ.read("ACCELERATE_MIXED_PRECISION") if mixed_precision is None else str(mixed_precision)
    if said is not None and said not in _PRECISIONS:
        raise ValueError(f"mixed_precision={said!r}: must be one of {', '.join(_PRECISIONS)}")
    return said


def accumulation_of(num_steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """Return the options of accumulation, from the number or from the plugin; a ValueError refuses two numbers."""
    if plugin is None:
        launched = environ.read("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
        if launched is not None and num_steps == 1:
            said = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
            return GradientAccumulationPlugin(num_steps=checked_num_steps(launched, said=said))
        return GradientAccumulationPlugin(num_steps=checked_num_steps(num_steps))
    if num_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={num_steps} and gradient_accumulation_plugin=: give only one"
        )
    if plugin.num_steps is not None:
        checked_num_steps(plugin.num_steps, said="GradientAccumulationPlugin(num_steps")
    return plugin


def checked_num_steps(given: object, *, said: str = "gradient_accumulation_steps") -> int:
    """Return a number of micro-batches, given as a number or text; errors name its argument or variable, `said`."""
    try:
        number = int(str(given))
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(
            f"{said}={given!r}{')' if '(' in said else ''}: must be an integer of at least 1, the micro-batches in "
            "one optimizer step; say 1 to step with each of them"
        )
    return number
