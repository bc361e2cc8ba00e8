"""The division of tensors into boxes, and the places of the boxes in the files of a checkpoint.

Tensors of one shape that the ranks hold in the same way share one division. A plan and a manifest therefore grow with
the number of tensors, and not with that number times the number of ranks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeAlias

from drivetrain_weights.tensor_box import Box


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """The division of a tensor among the ranks that write it."""

    dtype: str  # its name in safetensors
    item_bytes: int
    shape: tuple[int, ...]  # that of the whole tensor
    # By rank, in the order in which they lie in its file. Each element of the tensor is in one of them.
    boxes: Mapping[int, tuple[Box, ...]]

    @property
    def size_bytes(self) -> int:
        """The size of all elements in bytes."""
        return prod(self.shape) * self.item_bytes

    @property
    def num_pieces(self) -> int:
        """The number of boxes."""
        return sum(map(len, self.boxes.values()))

    def bytes_of(self, rank: int) -> int:
        """Return the size of the boxes that a rank writes, in bytes."""
        return sum(box.num_elements for box in self.boxes.get(rank, ())) * self.item_bytes


# The division of each tensor, by part of the checkpoint and by name.
Divisions: TypeAlias = Mapping[str, Mapping[str, Division]]


def list_in_file_order(tensors: Mapping[str, Division], rank: int) -> list[tuple[str, Division]]:
    """Return the tensors that a rank writes, in the order of its file. Pure.

    The widest dtype comes first, as in the safetensors library: every tensor starts at a multiple of its item size.
    """
    held = [(name, division) for name, division in tensors.items() if rank in division.boxes]
    return sorted(held, key=lambda one: -one[1].item_bytes)


def starts_in_file(tensors: Mapping[str, Division], rank: int, size_bytes: int) -> dict[str, int]:
    """Return the first byte of each tensor in a rank's file of a part, in the order of the file. Pure.

    The boxes follow one another without gaps up to the end of the file. The boxes of one tensor lie together.
    """
    held = list_in_file_order(tensors, rank)
    bytes_of = {division: division.bytes_of(rank) for division in set(tensors.values())}
    sizes = [bytes_of[division] for _, division in held]
    return dict(
        zip((name for name, _ in held), accumulate(sizes, initial=size_bytes - sum(sizes)), strict=False)
    )


def bytes_by_rank(divisions: Iterable[Division]) -> dict[int, int]:
    """Return the total size of the boxes of some tensors, in bytes, by the rank that writes them. Pure."""
    totals: Counter[int] = Counter()
    for division, count in Counter(divisions).items():
        for rank in division.boxes:
            totals[rank] += count * division.bytes_of(rank)
    return totals
