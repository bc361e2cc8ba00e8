"""DDP's communication hooks: the dtype or approximation in which ranks exchange the gradients of a bucket."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from drivetrain_backends.ddp import compat
from drivetrain_backends.settings import DDPSettings
from drivetrain_precision import DtypePolicy, PrecisionError


@dataclass(frozen=True, slots=True)
class ReduceIn:
    """The state of `reduce_in_dtype`: the dtype of the sums, and the ranks."""

    dtype: torch.dtype
    group: dist.ProcessGroup | None


def reduce_in_dtype(state: ReduceIn, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket's gradients over ranks in the dtype of `state`; a communication hook of DDP.

    torch's own hooks compress to a half precision; this one also sums half-precision gradients in fp32.
    """
    gradients = bucket.buffer()
    sums = gradients.to(state.dtype).div_(dist.get_world_size(state.group))
    work = dist.all_reduce(sums, group=state.group, async_op=True)
    assert work is not None  # only ranks outside the group get None

    def write_back(sent: Future[Any]) -> Tensor:
        value = sent.value()
        return gradients if value[0] is gradients else gradients.copy_(value[0])

    return work.get_future().then(write_back)


_HOOKS = MappingProxyType(
    {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook, "power_sgd": powerSGD_hook}
)
_NAMES = MappingProxyType(
    {hook: name for name, hook in _HOOKS.items()} | {reduce_in_dtype: "none", None: "none"}
)
_COMPRESSED = MappingProxyType({"fp16": torch.float16, "bf16": torch.bfloat16})


def check_hook(settings: DDPSettings, dtypes: DtypePolicy) -> None:
    """Refuse a communication hook that contradicts the dtype of the run's reduction."""
    hook = settings.communication_hook
    if dtypes.reduce is not None and hook != "none" and _COMPRESSED.get(hook) is not dtypes.reduce:
        raise PrecisionError(
            f"precision.reduce_dtype={dtypes.said()['reduce_dtype']!r} with ddp.communication_hook={hook!r}: both "
            "say in what ranks add up gradients, and they differ; leave one of the two out"
        )


def register_hook(ddp: DistributedDataParallel, settings: DDPSettings, dtype: torch.dtype | None) -> None:
    """Register the hook of the settings; for none, the one that sums in `dtype`, if gradients have another."""
    hook, group = settings.communication_hook, ddp.process_group
    if hook == "none":
        if dtype is not None and {p.dtype for p in ddp.module.parameters() if p.requires_grad} != {dtype}:
            ddp.register_comm_hook(ReduceIn(dtype, group), reduce_in_dtype)
        return
    state: object = group
    if hook == "power_sgd":
        state = PowerSGDState(
            process_group=group,
            matrix_approximation_rank=settings.power_sgd_rank,
            start_powerSGD_iter=settings.power_sgd_start_step,
        )
    ddp.register_comm_hook(state, _HOOKS[hook])


def applied_hook(ddp: DistributedDataParallel) -> dict[str, object]:
    """Return the settings of gradient compression, read back from DDP's hook."""
    hook, state = compat.communication_hook(ddp)
    name = _NAMES.get(hook, getattr(hook, "__qualname__", "unknown"))
    found: dict[str, object] = {"communication_hook": name}
    if isinstance(state, PowerSGDState):
        found["power_sgd_rank"] = state.matrix_approximation_rank
        found["power_sgd_start_step"] = state.start_powerSGD_iter
    return found


def hook_dtype(ddp: DistributedDataParallel) -> torch.dtype | None:
    """Return the dtype in which the reducer sums gradients, read back; None for several dtypes or PowerSGD."""
    hook, state = compat.communication_hook(ddp)
    if isinstance(state, ReduceIn):
        return state.dtype
    if hook is not None:
        return _COMPRESSED.get(_NAMES.get(hook, ""))
    own = {p.dtype for p in ddp.module.parameters() if p.requires_grad}
    return own.pop() if len(own) == 1 else None
