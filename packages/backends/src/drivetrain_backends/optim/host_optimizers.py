"""Optimizers that keep states or steps in the host's memory: refuse torchao's, restore bitsandbytes' paged memory.

bitsandbytes' paged optimizers lose their paged memory when they load a state; this module restores it. torchao's
CPUOffloadOptimizer steps copies of the parameters, but no backend trains the copies.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from drivetrain_backends.errors import OptimizerStateError


def check_steps_parameters(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that step copies of the parameters in host memory, as torchao's CPUOffloadOptimizer does.

    CPUOffloadOptimizer copies each gradient inside backward, before the gradient is averaged, unscaled, weighted and
    clipped. Ranks would silently drift apart, and clipping would do nothing.
    """
    for optimizer in optimizers:
        if isinstance(getattr(optimizer, "param_d2h_map", None), Mapping):
            raise OptimizerStateError(
                f"{type(optimizer).__name__} steps copies of the parameters in host memory, and takes each gradient "
                "inside backward, before it is averaged over ranks, unscaled, accumulated and clipped. Have the "
                "backend keep states in host memory: fsdp.offload=True (on one process too) with AdamW or "
                "torchao.optim.AdamW8bit, or deepspeed.offload_optimizer='cpu' with AdamW; or page them, with "
                "bitsandbytes.optim.PagedAdamW8bit"
            )


def page_states(optimizer: Any) -> None:
    """Move the states of a paged optimizer back into paged memory, after the optimizer has loaded them.

    bitsandbytes (0.50) loads all states into the device's memory: a resumed run would lose the saving by paging.
    """
    if getattr(optimizer, "is_paged", False) is not True or not hasattr(optimizer, "get_state_buffer"):
        return
    for parameter, state in optimizer.state.items():
        for key in ("state1", "state2"):
            value = state.get(key) if isinstance(state, dict) else None
            if isinstance(value, Tensor) and not getattr(value, "is_paged", False):
                buffer = optimizer.get_state_buffer(parameter, dtype=value.dtype)
                if buffer.shape == value.shape:
                    state[key] = buffer.copy_(value)
