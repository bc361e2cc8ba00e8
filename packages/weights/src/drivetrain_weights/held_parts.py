"""The parts that a rank holds of a tensor which ranks divide: boxes of it, or a range of its elements."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain_weights.tensor_box import Box


@dataclass(frozen=True, slots=True, eq=False)
class HeldBoxes:
    """The boxes of a tensor that this rank holds.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype of the elements.
        boxes: The boxes, each with its elements in the shape of the box.
    """

    shape: torch.Size
    dtype: torch.dtype
    boxes: tuple[tuple[Box, Tensor], ...]

    def held_boxes(self) -> Sequence[tuple[Box, Tensor]]:
        """Return the boxes, each with its elements."""
        return self.boxes


@dataclass(frozen=True, slots=True, eq=False)
class HeldRange:
    """The range of a tensor's elements that this rank holds.

    Attributes:
        shape: The shape of the whole tensor.
        start: The index of the first element, in row-major order.
        elements: The elements, of shape (n,).
    """

    shape: torch.Size
    start: int
    elements: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.elements.dtype

    def flat_range(self) -> tuple[int, Tensor]:
        """Return the index of the first element, and the elements."""
        return self.start, self.elements
