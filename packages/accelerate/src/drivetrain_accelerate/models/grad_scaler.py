"""The loss scale of fp16."""

from typing import Any

import torch

from drivetrain_accelerate.plugins.enums import DistributedType


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a scale for the loss of fp16, for the current accelerator.

    Args:
        distributed_type: The way in which processes train together: sharded gradients have a scaler of their own.
        kwargs: The options of the scaler.
    """
    found = torch.accelerator.current_accelerator()
    device = "cuda" if found is None else found.type
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device, **kwargs)
    return torch.amp.GradScaler(device, **kwargs)
