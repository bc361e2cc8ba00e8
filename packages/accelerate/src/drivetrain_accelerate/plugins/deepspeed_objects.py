"""Stand-ins for the optimizer and schedule of a DeepSpeed configuration, and functions that replace them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain_accelerate.plugins.deepspeed_plugin import DeepSpeedPlugin
from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_accelerate.plugins.option_fields import TranslationError

_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_DEEPSPEED_ONLY = ("adam_w_mode", "torch_adam", "bias_correction")


class DummyOptim:
    """The optimizer that the section `optimizer` of a DeepSpeed configuration describes.

    The arguments fill values that the section leaves as "auto".
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """The learning rate schedule that the section `scheduler` of a DeepSpeed configuration describes.

    The arguments fill values that the section leaves as "auto". Instead of a section, `lr_scheduler_callable` may
    make the schedule from the optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin | None:
    """Return the selected plugin of an `AcceleratorState`; raise a ValueError if none is selected."""
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError(
            "no plugin of DeepSpeed is in use: give Accelerator(deepspeed_plugin=...), or choose one by "
            "AcceleratorState().select_deepspeed_plugin(name)"
        )
    plugins = state.deepspeed_plugins
    if not isinstance(plugins, dict):
        return plugins
    chosen: list[DeepSpeedPlugin] = [plugin for plugin in plugins.values() if plugin.selected]
    if not chosen:
        raise ValueError(
            f"none of the plugins {', '.join(plugins)} is chosen: call "
            "AcceleratorState().select_deepspeed_plugin(name)"
        )
    return chosen[0]


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's CPU optimizer for a torch optimizer; raise a ValueError if none computes the same."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    kinds: dict[type[Optimizer], tuple[Any, dict[str, Any]]] = {
        Adam: (DeepSpeedCPUAdam, {"adamw_mode": False}),
        AdamW: (DeepSpeedCPUAdam, {"adamw_mode": True}),
        Adagrad: (DeepSpeedCPUAdagrad, {}),
    }
    if type(optimizer) not in kinds:
        raise ValueError(
            f"DeepSpeed has no optimizer on the CPU that computes as {type(optimizer).__name__}; take Adam, AdamW or "
            "Adagrad, or offload nothing"
        )
    kind, options = kinds[type(optimizer)]
    return kind(optimizer.param_groups, **options)


def check_said_once(
    config: Mapping[str, Any], *, optimizers: Sequence[object], schedulers: Sequence[object]
) -> None:
    """Raise a ValueError if an optimizer or schedule comes from both configuration and program, or from neither."""
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
    """Return torch's optimizer for the section `optimizer`; the stand-in fills values that are "auto"."""
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
    return cast("Any", kind)(stand_in.params, **options)


def scheduler_for(stand_in: DummyScheduler, optimizer: Optimizer, config: Mapping[str, Any]) -> LRScheduler:
    """Return the schedule that the stand-in's function makes, or else the one that the section `scheduler` says."""
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
