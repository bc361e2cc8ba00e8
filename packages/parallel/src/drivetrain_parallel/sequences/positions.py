"""The division of a sequence among the ranks of a context axis, as arithmetic on positions."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drivetrain_parallel.compat import once_differentiable, unseen_by_modes
from drivetrain_parallel.ranks import TensorRanks


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceCut:
    """The division of `length` positions among `size` ranks, each of which holds equally many.

    The sequence is cut into `2 * size` equal chunks, and each rank holds one from either end: under a causal mask, a
    position costs as many products as it has predecessors, and so every rank has the same work. Chunks beyond the end
    are filled with copies of the last position, which nothing attends to and which are dropped in the end.

    Attributes:
        length: The number of positions of the whole sequence.
        size: The number of ranks.
        device: The device of the index tensors.

    Example:
        >>> cut = SequenceCut(length=7, size=2)
        >>> cut.positions(0).tolist(), cut.positions(1).tolist()
        ([0, 1, 6, 6], [2, 3, 4, 5])
    """

    length: int
    size: int
    device: torch.device | None = None

    @property
    def chunk(self) -> int:
        """The number of positions of a chunk."""
        return -(-self.length // (2 * self.size))

    @property
    def own_length(self) -> int:
        """The number of positions that each rank holds, with those beyond the end."""
        return 2 * self.chunk

    def chunks(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the (start, stop) of a rank's two chunks; a chunk beyond the end has none between them."""
        first, second = rank * self.chunk, (2 * self.size - 1 - rank) * self.chunk
        return self._clipped(first), self._clipped(second)

    def _clipped(self, start: int) -> tuple[int, int]:
        return min(start, self.length), min(start + self.chunk, self.length)

    def positions(self, rank: int) -> Tensor:
        """Return the positions that a rank holds, int64 of shape (own_length,)."""
        return self.all_positions.view(self.size, -1)[rank]

    @cached_property
    @unseen_by_modes()  # selective checkpointing would look for what only the first use computes
    def all_positions(self) -> Tensor:
        """The positions that all ranks hold, one rank after the other, int64 of shape (size * own_length,)."""
        chunks = torch.arange(2 * self.size * self.chunk, device=self.device).view(2, self.size, self.chunk)
        by_rank = torch.stack([chunks[0], chunks[1].flip(0)], 1)
        return by_rank.flatten().clamp(max=self.length - 1)

    @cached_property
    @unseen_by_modes()  # selective checkpointing would look for what only the first use computes
    def order(self) -> Tensor:
        """The place of each position in `all_positions`, int64 of shape (length,)."""
        positions = torch.arange(self.length, device=self.device)
        number, place = positions // self.chunk, positions % self.chunk
        is_second = number >= self.size
        rank = torch.where(is_second, 2 * self.size - 1 - number, number)
        return (2 * rank + is_second) * self.chunk + place

    @unseen_by_modes()
    def rows(self, num_sequences: int) -> Tensor:
        """Return the place of each position of each sequence, int64 of shape (num_sequences, length).

        It is counted through what all ranks hold, one rank after the other: its sequences, and their positions.
        """
        rank, place = self.order // self.own_length, self.order % self.own_length
        sequences = torch.arange(num_sequences, device=self.device)
        return (rank * num_sequences + sequences[:, None]) * self.own_length + place


class _TakePositions(Function):
    """The positions of this rank, of a whole sequence: the gradients of all ranks make that of the whole."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, cut: SequenceCut, ranks: TensorRanks, share: float
    ) -> Tensor:
        ctx.where, ctx.share = (dim, cut, ranks), share
        return tensor.index_select(dim, cut.positions(ranks.rank))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dim, cut, ranks = ctx.where
        whole = ranks.join(gradients[0].contiguous(), dim, (cut.own_length,) * cut.size)
        whole = whole.index_select(dim, cut.order)
        return (whole if ctx.share == 1 else whole.mul_(ctx.share), *[None] * 5)


def take_positions(
    tensor: Tensor, cut: SequenceCut, ranks: TensorRanks, *, dim: int = 1, share: float = 1
) -> Tensor:
    """Return this rank's positions, along `dim`, of a tensor that all ranks hold alike. Called on all of them.

    The gradient of the tensor is what those of all parts make together, multiplied by `share`.
    """
    return _TakePositions.apply(tensor, dim, cut, ranks, share)  # type: ignore[no-any-return]
