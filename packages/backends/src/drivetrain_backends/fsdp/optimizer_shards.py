"""The replacement of parameters by their shards in optimizers built before their model was sharded."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_backends.state_dict.block_tensors import Restored, as_stored, has_parts
from drivetrain_backends.state_dict.dtensor import local, own_part


def repoint(optimizer: Optimizer, successors: MutableMapping[Tensor, Tensor]) -> None:
    """Replace parameters by their shards, in the groups and in the state of an optimizer.

    State of a parameter's shape is sharded like it: each rank keeps its own part of its own state.
    """
    for group in optimizer.param_groups:
        group["params"] = [successors.get(p, p) for p in group["params"]]
        kinds = {isinstance(p, DTensor) for p in group["params"]}
        if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False  # torch's foreach functions do not mix sharded with full tensors
    for parameter in [p for p in optimizer.state if p in successors]:
        state: dict[str, Any] = optimizer.state.pop(parameter)
        shard = successors[parameter]
        restored = Restored(optimizer)
        optimizer.state[shard] = {
            key: restored.restore(as_stored(value), shard) if has_parts(value) else _divided(value, shard)
            for key, value in state.items()
        }


@torch.no_grad()
def _divided(value: Any, shard: Tensor) -> Any:
    """Return this rank's shard of a value that has the parameter's shape."""
    if not isinstance(value, Tensor) or value.shape != shard.shape or value.dim() == 0:
        return value
    divided = torch.empty_like(shard, dtype=value.dtype).detach()
    local(divided).copy_(own_part(value, shard))
    return divided
