"""Full tensors from states whose tensors are sharded."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor


def full_tensor(value: Any) -> Tensor:
    """Return a tensor of a state, gathered if it is sharded. Called on all ranks, in the same order.

    Args:
        value: A tensor, or an object with `full_tensor()`, like torch's DTensor.
    """
    if not hasattr(value, "full_tensor"):
        return value
    if isinstance(value, Tensor):
        # A DTensor, which may be offloaded while its mesh communicates on another device. Importing DTensor takes as
        # long as importing torch.
        from drivetrain_backends.state_dict.dtensor import whole_of

        return whole_of(value, torch.device(cast("Any", value).device_mesh.device_type))
    return value.full_tensor()


def full_state_dict(state: Any, *, keep: bool = True) -> Any:
    """Return a nested state with its sharded tensors replaced by full ones on the CPU. Called on all ranks.

    Tensors are gathered one at a time. A tensor at two places, such as a tied weight, is gathered once and stays
    shared.

    Args:
        state: Nested dicts, lists and tuples.
        keep: Whether this rank keeps the tensors; otherwise None replaces them.
    """
    return _whole(state, keep, {})


def _whole(value: Any, keep: bool, met: dict[int, Any]) -> Any:
    if hasattr(value, "full_tensor"):
        if id(value) not in met:
            gathered = value.full_tensor()
            # The value is kept alive, so that its id stays unique.
            met[id(value)] = (value, gathered.detach().cpu() if keep else None)
        return met[id(value)][1]
    if isinstance(value, Mapping):
        return {key: _whole(one, keep, met) for key, one in cast("Mapping[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)(_whole(one, keep, met) for one in cast("list[Any]", value))
    return value
