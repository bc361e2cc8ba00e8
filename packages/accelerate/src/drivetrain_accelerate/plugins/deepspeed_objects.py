"""Objects that stand for what a DeepSpeed configuration makes, and functions over them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Adagrad, Adam, AdamW, Optimizer

from drivetrain_accelerate.plugins.deepspeed_plugin import DeepSpeedPlugin
from drivetrain_accelerate.plugins.enums import DistributedType


class DummyOptim:
    """The optimizer that the section `optimizer` of a DeepSpeed configuration describes.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate, where the section leaves it open.
        weight_decay: The weight decay, likewise.
        **kwargs: Further options of the program's own.
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

    Args:
        optimizer: The optimizer, or its stand-in.
        total_num_steps: The number of steps of the run, where the section leaves it open.
        warmup_num_steps: The number of steps in which the rate rises, likewise.
        lr_scheduler_callable: A function of the optimizer that returns a schedule, instead of a section.
        **kwargs: Further options of the program's own.
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
    """Return the plugin in use.

    Args:
        state: The `AcceleratorState` of the run.

    Raises:
        ValueError: The state's processes do not train by DeepSpeed, or none of several plugins is chosen.
    """
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
    """Return DeepSpeed's optimizer on the CPU that computes the same as one of torch's.

    Raises:
        ValueError: DeepSpeed has none that does.
    """
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    kind: Any
    options: dict[str, Any]
    if type(optimizer) is AdamW or type(optimizer) is Adam:
        kind, options = DeepSpeedCPUAdam, {"adamw_mode": type(optimizer) is AdamW}
    elif type(optimizer) is Adagrad:
        kind, options = DeepSpeedCPUAdagrad, {}
    else:
        raise ValueError(
            f"DeepSpeed has no optimizer on the CPU that computes as {type(optimizer).__name__}; take Adam, AdamW or "
            "Adagrad, or offload nothing"
        )
    return kind(optimizer.param_groups, **options)
