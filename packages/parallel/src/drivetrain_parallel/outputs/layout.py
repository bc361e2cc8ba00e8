"""The layout of a tensor of which each rank holds some rows, or some columns, or some columns of some rows.

A part has two dimensions, its rows and its columns of them. The rows of all parts, one rank after the other, are
counted through, and `rows` says which of them stands where in the whole: views and indices change it, and no part.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from drivetrain_parallel.ranks import OneRank, TensorRanks, gather, join


@dataclass(frozen=True, kw_only=True, eq=False)
class PartLayout:
    """The layout of a tensor of which ranks hold parts of shape (num_own, own columns).

    Ranks that hold other rows may average the gradients of parameters: the gradient of a part is then as many times
    its share of the whole gradient.

    Attributes:
        rows: The number of each row among those of all parts, int64 of the whole's shape without its last dimension.
            None is there twice; one that is not there is left out, as padding is.
        num_own: The number of rows of each part.
        row_ranks: The ranks that hold the rows.
        sizes: The number of columns of each of `column_ranks`.
        column_ranks: The ranks that hold columns of the same rows.
        averages: Whether ranks that hold other rows average the gradients of parameters. If not, they compute alike
            whatever is outside of parts, and rows are joined before parameters see them.
        factor: The number of times that parts are larger than their share of the whole: 1, but for gradients.
    """

    rows: Tensor
    num_own: int
    row_ranks: TensorRanks
    sizes: tuple[int, ...]
    column_ranks: TensorRanks
    averages: bool = True
    factor: int = 1

    @classmethod
    def of_columns(cls, part: Tensor, sizes: tuple[int, ...], ranks: TensorRanks) -> Self:
        """Return the layout of ranks that hold some columns, such as `part` of shape (..., own columns)."""
        num_rows = part.shape[:-1].numel()
        rows = torch.arange(num_rows, device=part.device).view(part.shape[:-1])
        return cls(rows=rows, num_own=num_rows, row_ranks=OneRank(), sizes=sizes, column_ranks=ranks)

    @classmethod
    def of_rows(cls, part: Tensor, rows: Tensor, ranks: TensorRanks, *, averages: bool = True) -> Self:
        """Return the layout of ranks that hold some rows, such as `part` of shape (..., columns)."""
        num_own, sizes = part.shape[:-1].numel(), part.shape[-1:]
        return cls(
            rows=rows,
            num_own=num_own,
            row_ranks=ranks,
            sizes=sizes,
            column_ranks=OneRank(),
            averages=averages,
        )

    @property
    def has_whole_rows(self) -> bool:
        """True if each rank holds all columns of its rows."""
        return self.column_ranks.size == 1

    @property
    def has_all_rows(self) -> bool:
        """True if each rank holds all rows, and all of them in order: none moves, and so none is out of place."""
        return self.row_ranks.size == 1 and self.rows.numel() == self.num_own

    @cached_property
    def dense_rows(self) -> Tensor:
        """The rows, contiguous, as those of what is computed are."""
        return self.rows.contiguous()

    @cached_property
    def places(self) -> Tensor:
        """The place of each own row in the whole, int64 of shape (num_own,); -1 of rows that are left out."""
        numbers = self.rows.flatten()
        every = numbers.new_full((self.row_ranks.size * self.num_own,), -1)
        every.scatter_(0, numbers, torch.arange(len(numbers), device=numbers.device))
        return every.narrow(0, self.row_ranks.rank * self.num_own, self.num_own)

    def is_like(self, other: "PartLayout") -> bool:
        """Return whether parts of two layouts hold the same rows, and columns that belong together."""
        same_columns = self.sizes == other.sizes or self.has_whole_rows
        is_same = self.dense_rows is other.dense_rows and self.column_ranks is other.column_ranks
        return is_same and same_columns and self.factor == other.factor

    def meet(self, place: str, by: str) -> None:
        """Wait until all ranks come to a place; see `TensorRanks.meet`."""
        self.column_ranks.meet(place, by)
        self.row_ranks.meet(place, by)

    def join(self, part: Tensor) -> Tensor:
        """Return the whole of which ranks hold parts. Called on all of them."""
        found = self.in_order(join(part, -1, self.sizes, self.column_ranks))
        found = found.view(*self.rows.shape, found.shape[-1])
        return found if self.factor == 1 else found / self.factor

    def in_order(self, own: Tensor) -> Tensor:
        """Return what ranks computed of their own rows, (num_own, ...), in the order of the whole. Called on all."""
        if self.has_all_rows:
            return own
        if self.row_ranks.size > 1:
            sizes = (self.num_own,) * self.row_ranks.size
            own = gather(own, 0, self.row_ranks) if self.averages else join(own, 0, sizes, self.row_ranks)
        return own.index_select(0, self.rows.flatten())

    def own_rows(self, whole: Tensor, left_out: float) -> Tensor:
        """Return the own rows of a tensor of rows in the order of the whole; `left_out` stands for the others."""
        if self.has_all_rows:
            return whole
        if not len(whole):
            return whole.new_full((self.num_own, *whole.shape[1:]), left_out)
        is_left_out = (self.places < 0).view(-1, *[1] * (whole.dim() - 1))
        return whole.index_select(0, self.places.clamp(min=0)).masked_fill_(is_left_out, left_out)

    def own_gradient(self, whole: Tensor) -> Tensor:
        """Return the gradient of this rank's part, of that of the whole."""
        rank = self.column_ranks.rank
        own = whole.narrow(-1, sum(self.sizes[:rank]), self.sizes[rank]).flatten(0, -2)
        return own if self.has_all_rows else self.own_rows(own, 0).mul_(self.of_gradient.factor)

    @cached_property
    def of_gradient(self) -> Self:
        """Return the layout of the gradients of parts."""
        return replace(self, factor=self.row_ranks.size if self.averages else 1)

    def of_found(self, found: Tensor) -> Self:
        """Return the layout of what is computed of parts, row by row."""
        sizes = found.shape[-1:] if self.has_whole_rows else self.sizes
        return replace(self, rows=self.dense_rows, sizes=sizes)

    def taken(self, part: Tensor, rows: Tensor) -> tuple[Tensor, Self]:
        """Return the part and the layout of some of these rows, where one may be twice, in parts of their own.

        All parts have room for as many rows as the rank with the most of them.
        """
        numbers, rank = rows.flatten(), self.row_ranks.rank
        holder = numbers // max(1, self.num_own)
        counts = holder.bincount(minlength=self.row_ranks.size)
        most, order = int(counts.max()), holder.argsort(stable=True)
        every = torch.arange(len(numbers), device=rows.device)
        number = torch.empty_like(numbers)  # of each row, among those that its rank holds
        number[order] = every - (counts.cumsum(0) - counts)[holder[order]]
        is_own = holder == rank
        own = numbers.new_zeros(most)
        own[number[is_own]] = numbers[is_own] - rank * self.num_own
        taken = replace(self, rows=(holder * most + number).view(rows.shape), num_own=most)
        return part.index_select(0, own), taken
