"""Make the optimizer and the schedule that a DeepSpeed configuration describes, for their stand-ins."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain_accelerate.plugins.deepspeed_objects import DummyOptim, DummyScheduler
from drivetrain_accelerate.plugins.translation import TranslationError

_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_DEEPSPEED_ONLY = ("adam_w_mode", "torch_adam", "bias_correction")


def check_said_once(
    config: Mapping[str, Any], *, optimizers: Sequence[object], schedulers: Sequence[object]
) -> None:
    """Check that a configuration's sections and the program's objects do not both say the same.

    Args:
        config: The DeepSpeed configuration.
        optimizers: The optimizers that are prepared.
        schedulers: The schedules that are prepared.

    Raises:
        ValueError: Both say it, or neither does.
    """
    for name, given, stand_in in (
        ("optimizer", optimizers, DummyOptim),
        ("scheduler", schedulers, DummyScheduler),
    ):
        for each in given:
            is_open = isinstance(each, stand_in) and getattr(each, "lr_scheduler_callable", None) is None
            if name in config and not isinstance(each, stand_in):
                raise ValueError(
                    f"the DeepSpeed configuration has a section {name}, and a {type(each).__name__} is prepared: "
                    f"take the section out, or prepare accelerate.utils.{stand_in.__name__}(...)"
                )
            if name not in config and is_open:
                raise ValueError(
                    f"{stand_in.__name__} stands for the section {name} of the DeepSpeed configuration, which has "
                    f"none: write one, or prepare one of torch's"
                )


def optimizer_for(stand_in: DummyOptim, config: Mapping[str, Any]) -> Optimizer:
    """Return torch's optimizer for the section `optimizer`; what is "auto" comes from the stand-in.

    Raises:
        TranslationError: torch has no optimizer of this type.
    """
    section: Mapping[str, Any] = config["optimizer"]
    given = section.get("params", {})
    said: dict[str, Any] = {
        name: value for name, value in given.items() if value != "auto" and name not in _DEEPSPEED_ONLY
    }
    said.setdefault("lr", stand_in.lr)
    said.setdefault("weight_decay", stand_in.weight_decay)
    name = str(section.get("type"))
    if name.lower() == "adam":  # DeepSpeed's decouples the weight decay unless it is told not to
        name = "AdamW" if given.get("adam_w_mode", True) else "Adam"
    kinds = {each.lower(): getattr(torch.optim, each) for each in dir(torch.optim)}
    kind: Any = kinds.get(name.lower())
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        raise TranslationError(
            f"DeepSpeed configuration: optimizer.type={section.get('type')!r} (drivetrain: prepare): torch.optim has "
            "none of this name; make the optimizer in the program, and take the section out"
        )
    options: dict[str, Any] = {
        each: tuple(value) if isinstance(value, list) else value for each, value in said.items()
    }
    made: Any = kind
    return made(stand_in.params, **options)


def scheduler_for(stand_in: DummyScheduler, optimizer: Optimizer, config: Mapping[str, Any]) -> LRScheduler:
    """Return the schedule of the stand-in's function, or else DeepSpeed's for the section `scheduler`.

    Raises:
        TranslationError: DeepSpeed has no schedule of this type.
    """
    if stand_in.lr_scheduler_callable is not None:
        return stand_in.lr_scheduler_callable(optimizer)
    section: Mapping[str, Any] = config["scheduler"]
    name = section.get("type")
    if name not in _SCHEDULES:
        raise TranslationError(
            f"DeepSpeed configuration: scheduler.type={name!r} (drivetrain: prepare): must be one of "
            f"{', '.join(_SCHEDULES)}; or make the schedule in the program, and take the section out"
        )
    from deepspeed.runtime import lr_schedules

    filled = {
        "warmup_min_lr": 0,
        "warmup_max_lr": optimizer.param_groups[0]["lr"],
        "warmup_num_steps": stand_in.warmup_num_steps,
        "total_num_steps": stand_in.total_num_steps,
    }
    given: Mapping[str, Any] = section.get("params", {})
    options = {each: filled.get(each) if value == "auto" else value for each, value in given.items()}
    return getattr(lr_schedules, name)(optimizer, **options)
