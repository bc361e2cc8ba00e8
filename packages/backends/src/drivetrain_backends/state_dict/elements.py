"""The elements that a rank holds of a tensor of a state, and others in their place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain_backends.state_dict.dtensor import local, sharded_like
from drivetrain_weights.held_parts import HeldBoxes, HeldRange
from drivetrain_weights.tensor_box import is_dtensor


def own_elements(value: Any) -> list[Tensor]:
    """Return what this rank holds of a tensor of a state, in any form: without copies, where the state has none."""
    if hasattr(value, "flat_range"):
        return [value.flat_range()[1].detach()]
    if hasattr(value, "held_boxes"):
        return [elements.detach() for _, elements in value.held_boxes()]
    return [local(value).detach()]


def with_elements(value: Any, elements: Sequence[Tensor]) -> Any:
    """Return a tensor that is divided as `value` is, with other elements in place of `own_elements(value)`."""
    if hasattr(value, "flat_range"):
        return HeldRange(torch.Size(value.shape), value.flat_range()[0], elements[0])
    if hasattr(value, "held_boxes"):
        boxes = [box for box, _ in value.held_boxes()]
        dtype = elements[0].dtype if elements else value.dtype
        return HeldBoxes(torch.Size(value.shape), dtype, tuple(zip(boxes, elements, strict=True)))
    return sharded_like(elements[0], value) if is_dtensor(value) else elements[0]
