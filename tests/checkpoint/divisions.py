"""Ways in which ranks may hold a tensor, for property tests."""

from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import strategies as st

from drivetrain_weights.tensor_box import Box, boxes_of_range, whole

Boxes = tuple[Box, ...]


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """The elements of a box, as indices into the flattened tensor."""
    return np.atleast_1d(np.arange(prod(shape)).reshape(shape)[box.slices()]).ravel().tolist()


@st.composite
def divided(draw: st.DrawFn, shape: tuple[int, ...], world_size: int) -> list[Boxes]:
    """Boxes by rank: whole on rank 0, whole on all, rows or columns as torch divides them, or runs as ZeRO does."""
    kinds = ["rank 0", "all", "runs"] + [f"dim {dim}" for dim in range(len(shape))]
    kind = draw(st.sampled_from(kinds))
    if kind == "rank 0":
        return [(whole(shape),) if rank == 0 else () for rank in range(world_size)]
    if kind == "all":
        return [(whole(shape),)] * world_size
    if kind == "runs":
        cuts = sorted(
            draw(st.lists(st.integers(0, prod(shape)), min_size=world_size - 1, max_size=world_size - 1))
        )
        ends = [0, *cuts, prod(shape)]
        return [tuple(boxes_of_range(shape, a, b)) for a, b in pairwise(ends)]
    dim = int(kind.removeprefix("dim "))
    size = -(-shape[dim] // world_size)
    parts: list[Boxes] = []
    for rank in range(world_size):
        start = min(rank * size, shape[dim])
        box = Box(
            offsets=tuple(start if axis == dim else 0 for axis in range(len(shape))),
            sizes=tuple(min(size, shape[dim] - start) if axis == dim else n for axis, n in enumerate(shape)),
        )
        parts.append((box,) if box.num_elements else ())
    return parts
