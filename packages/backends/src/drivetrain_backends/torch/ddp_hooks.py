"""The hooks by which DDP's reducer sends a bucket: compressed, or summed in another dtype than its own."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from drivetrain_backends.settings import DDPSettings
from drivetrain_backends.torch import compat
from drivetrain_precision import DtypePolicy, PrecisionError

_HOOKS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
    }
)
_COMPRESSED = MappingProxyType({"fp16": torch.float16, "bf16": torch.bfloat16})


@dataclass(frozen=True, slots=True)
class ReduceIn:
    """The state of `reduce_in_dtype`: the dtype of the sums, and the ranks."""

    dtype: torch.dtype
    group: ProcessGroup | None


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


def check_hook(settings: DDPSettings, dtypes: DtypePolicy) -> None:
    """Refuse a communication hook that contradicts the dtype of the run's reduction."""
    hook = settings.communication_hook
    if dtypes.reduce is not None and hook != "none" and _COMPRESSED.get(hook) is not dtypes.reduce:
        raise PrecisionError(
            f"precision.reduce_dtype={dtypes.said()['reduce_dtype']!r} with ddp.communication_hook={hook!r}: both "
            "say in what ranks add up gradients, and they differ; leave one of the two out"
        )


def register_hook(replica: DistributedDataParallel, settings: DDPSettings, dtype: torch.dtype | None) -> None:
    """Register what sends a replica's gradients: the hook of the settings, or one that sums in `dtype`."""
    hook = settings.communication_hook
    if hook == "none":
        reduced = {p.dtype for p in replica.module.parameters() if p.requires_grad}
        if dtype is not None and reduced != {dtype}:
            replica.register_comm_hook(ReduceIn(dtype, replica.process_group), reduce_in_dtype)
        return
    state: object = replica.process_group
    if hook == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=replica.process_group,
            matrix_approximation_rank=settings.power_sgd_rank,
            start_powerSGD_iter=settings.power_sgd_start_step,
        )
    replica.register_comm_hook(state, _HOOKS[hook])


def applied_hook(replica: DistributedDataParallel) -> dict[str, object]:
    """Return how gradients are compressed, read back from DDP's hooks."""
    names = {hook: name for name, hook in _HOOKS.items()} | {reduce_in_dtype: "none"}
    found: dict[str, object] = {"communication_hook": "none"}
    for hook, state in compat.communication_hooks(replica):
        found["communication_hook"] = names.get(hook, getattr(hook, "__qualname__", "unknown"))
        if isinstance(state, powerSGD_hook.PowerSGDState):
            found["power_sgd_rank"] = state.matrix_approximation_rank
            found["power_sgd_start_step"] = state.start_powerSGD_iter
    return found


def hook_dtype(replica: DistributedDataParallel) -> torch.dtype | None:
    """Return the dtype in which the reducer sums gradients, read back; None if they have several or PowerSGD's."""
    for hook, state in compat.communication_hooks(replica):
        if isinstance(state, ReduceIn):
            return state.dtype
        name = next((name for name, known in _HOOKS.items() if known is hook), "")
        return _COMPRESSED.get(name)
    own = {p.dtype for p in replica.module.parameters() if p.requires_grad}
    return next(iter(own)) if len(own) == 1 else None
