"""Whole tensors out of states whose tensors each rank holds a part of."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor


def whole(value: Any) -> Tensor:
    """A tensor of a state, gathered where each rank holds a part. Called on all ranks, in the same order.

    Args:
        value: A tensor, or anything with `full_tensor()`, as torch's DTensor.
    """
    if not hasattr(value, "full_tensor"):
        return value
    if isinstance(
        value, Tensor
    ):  # a DTensor, which may be offloaded, but whose ranks talk on its mesh's device
        from drivetrain_backends.state_dict.dtensor import (
            whole_of,  # DTensor's import takes as long as torch's
        )

        return whole_of(value, torch.device(cast("Any", value).device_mesh.device_type))
    return value.full_tensor()


def whole_state(state: Any, *, keep: bool = True) -> Any:
    """A nested state with whole tensors on the CPU in the place of partial ones. Called on all ranks.

    They are gathered one at a time. What stood at two places, as a tied weight does, is gathered once and stays one.

    Args:
        state: Nested dicts, lists and tuples.
        keep: Whether this rank keeps them; else None stands in their place.
    """
    return _whole(state, keep, {})


def _whole(value: Any, keep: bool, met: dict[int, Any]) -> Any:
    if hasattr(value, "full_tensor"):
        if id(value) not in met:
            gathered = value.full_tensor()
            met[id(value)] = (
                value,
                gathered.detach().cpu() if keep else None,
            )  # kept alive, so that its id is its own
        return met[id(value)][1]
    if isinstance(value, Mapping):
        return {key: _whole(one, keep, met) for key, one in cast("Mapping[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)(_whole(one, keep, met) for one in cast("list[Any]", value))
    return value
