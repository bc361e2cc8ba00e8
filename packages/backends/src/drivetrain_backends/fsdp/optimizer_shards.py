"""Optimizers that were made before their model was sharded, pointed to its shards."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_backends.state_dict.dtensor import local, own_part


def repoint(optimizer: Optimizer, successors: MutableMapping[Tensor, Tensor]) -> None:
    """Replace parameters by their shards, in the groups and in the state.

    State of a parameter's shape is divided as it is, each rank keeping its own part of what it holds itself.

    Args:
        optimizer: The user's optimizer; its groups stay the same objects.
        successors: What each parameter was replaced by.
    """
    for group in optimizer.param_groups:
        group["params"] = [successors.get(p, p) for p in group["params"]]
        kinds = {isinstance(p, DTensor) for p in group["params"]}
        if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False  # torch's lists of tensors do not mix divided with whole ones
    for parameter in [p for p in optimizer.state if p in successors]:
        state: dict[str, Any] = optimizer.state.pop(parameter)
        shard = successors[parameter]
        optimizer.state[shard] = {key: _divided(value, shard) for key, value in state.items()}


@torch.no_grad()
def _divided(value: Any, shard: Tensor) -> Any:
    """This rank's part of a value that has the parameter's shape."""
    if not isinstance(value, Tensor) or value.shape != shard.shape or value.dim() == 0:
        return value
    divided = torch.empty_like(shard, dtype=value.dtype).detach()
    local(divided).copy_(own_part(value, shard))
    return divided
