"""The ranks that hold one model together, and collectives over them that autograd follows."""

from collections.abc import Sequence
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from drivetrain_parallel.compat import once_differentiable

_LONE = (
    "{by}() asks on this rank for the whole of what each rank holds a part of ({place}), and other ranks do not come "
    "to it, or ask for something else: call it on all ranks alike; or run the model under torch.no_grad() or eval(), "
    "where every rank holds the whole"
)


class TensorRanks(Protocol):
    """The ranks that divide a model's layers, or hold its experts.

    Attributes:
        rank: The position of this rank among them.
        size: The number of these ranks.
    """

    rank: int
    size: int

    def add_up(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum over the ranks, in place. Called on all of them."""
        ...

    def join(self, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Return the tensors of all ranks, of `sizes` elements along `dim`, joined along it. Called on all ranks."""
        ...

    def exchange(
        self, tensor: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        """Return the rows that each rank sends to this one, in the order of the ranks. Called on all ranks.

        Args:
            tensor: The rows to send, contiguous, in the order of the ranks.
            sent: The number of rows for each rank; None for one.
            received: The number of rows of each rank; None for one.
        """
        ...

    def meet(self, place: str, by: str) -> None:
        """Wait on the host until all ranks come to a `place`; `by` is the function that asks for it.

        Raises:
            RuntimeError: Another rank is at another place, or does not come.
        """
        ...


class GroupRanks:
    """The ranks of a process group.

    Args:
        group: The group in which they add up and join.
        host: A group of the same ranks for tensors of the CPU, in which they meet and do nothing else: a rank that
            waits there alone disturbs no collective of the others. By default they do not meet.
    """

    def __init__(self, group: ProcessGroup, *, host: ProcessGroup | None = None) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._host = group, host

    def add_up(self, tensor: Tensor) -> None:
        """Add up a tensor over the group; see `TensorRanks`."""
        dist.all_reduce(tensor, group=self._group)

    def join(self, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Join the tensors of the group; see `TensorRanks`."""
        most = max(sizes)
        if missing := most - tensor.shape[dim]:  # gloo and NCCL gather tensors of one shape
            tensor = pad(tensor, [0, 0] * (tensor.dim() - dim - 1) + [0, missing])
        found = tensor.new_empty(len(sizes), *tensor.shape)
        dist.all_gather_into_tensor(found.flatten(0, 1), tensor.contiguous(), group=self._group)
        if min(sizes) == most:
            return found.movedim(0, dim).flatten(dim, dim + 1)
        return torch.cat([one.narrow(dim, 0, size) for one, size in zip(found, sizes, strict=True)], dim)

    def exchange(
        self, tensor: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        """Exchange rows within the group; see `TensorRanks`."""
        splits = [None if one is None else list(one) for one in (received, sent)]
        num_rows = self.size if received is None else sum(received)
        found = tensor.new_empty(num_rows, *tensor.shape[1:])
        dist.all_to_all_single(found, tensor, *splits, group=self._group)
        return found

    def meet(self, place: str, by: str) -> None:
        """Wait until all ranks come to a place; see `TensorRanks`."""
        if self._host is None:
            return
        own = torch.tensor([crc32(place.encode())])
        found = [torch.empty_like(own) for _ in range(self.size)]
        try:
            dist.all_gather(found, own, group=self._host)
        except RuntimeError as error:
            raise RuntimeError(_LONE.format(by=by, place=place)) from error
        if any(one != own for one in found):
            raise RuntimeError(_LONE.format(by=by, place=place))


class OneRank:
    """A rank without others."""

    rank, size = 0, 1

    def add_up(self, tensor: Tensor) -> None:
        """Leave the tensor as it is; see `TensorRanks`."""

    def join(self, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Return the tensor; see `TensorRanks`."""
        del dim, sizes
        return tensor

    def exchange(
        self, tensor: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        """Return the tensor; see `TensorRanks`."""
        del sent, received
        return tensor

    def meet(self, place: str, by: str) -> None:
        """Go on; see `TensorRanks`."""


class _Enter(Function):
    """The whole input of a divided layer: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)  # autograd owns what it passes
        return add_up(gradient, ctx.ranks), None


class _AddUp(Function):
    """The sum over the ranks: its gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.ranks = ranks
        ranks.add_up(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # The gradient of `enter` is a sum over the ranks: so gradients of gradients are right.
        return enter(gradients[0], ctx.ranks), None


class _Join(Function):
    """The parts of all ranks joined: the gradient is this rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, sizes: tuple[int, ...], ranks: TensorRanks) -> Tensor:
        ctx.where = dim, sizes, ranks
        return ranks.join(tensor.contiguous(), dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Own.apply(gradients[0], *ctx.where), None, None, None  # type: ignore[return-value]


class _Own(Function):
    """The own part of what all ranks hold alike: the gradients of all parts are that of the whole."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, sizes: tuple[int, ...], ranks: TensorRanks) -> Tensor:
        ctx.where = dim, sizes, ranks
        return tensor.narrow(dim, sum(sizes[: ranks.rank]), sizes[ranks.rank])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Join.apply(gradients[0], *ctx.where), None, None, None  # type: ignore[return-value]


class _Exchange(Function):
    """Rows of all ranks: their gradients go back to the ranks that sent them."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        ranks: TensorRanks,
        sent: Sequence[int] | None,
        received: Sequence[int] | None,
        gradient_factor: float,
    ) -> Tensor:
        ctx.back, ctx.factor = (ranks, received, sent, 1), gradient_factor
        return ranks.exchange(tensor.contiguous(), sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient: Any = _Exchange.apply(gradients[0], *ctx.back)
        # In place: what an exchange returns is new, and nothing else holds it.
        return gradient if ctx.factor == 1 else gradient.mul_(ctx.factor), None, None, None, None


class _Gather(Function):
    """The equal parts of all ranks joined, for ranks that go on differently: gradients of a part are added up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return ranks.join(tensor.contiguous(), dim, (tensor.shape[dim],) * ranks.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        parts = torch.stack(gradients[0].chunk(ctx.ranks.size, ctx.dim))
        return ctx.ranks.exchange(parts).sum(0), None, None


def enter(tensor: Tensor, ranks: TensorRanks) -> Tensor:
    """Return a tensor that all ranks hold alike, for a part of the model that they divide.

    Its gradient is added up over the ranks. Backward is called on all of them.
    """
    return _Enter.apply(tensor, ranks)  # type: ignore[no-any-return]


def add_up(tensor: Tensor, ranks: TensorRanks) -> Tensor:
    """Return the sum over the ranks of a new tensor that nothing else uses, in place. Called on all of them."""
    return _AddUp.apply(tensor.contiguous(), ranks)  # type: ignore[no-any-return]


def join(tensor: Tensor, dim: int, sizes: tuple[int, ...], ranks: TensorRanks) -> Tensor:
    """Return the parts of all ranks, of `sizes` elements along `dim`, as one tensor. Called on all of them."""
    return _Join.apply(tensor, dim % tensor.dim(), sizes, ranks)  # type: ignore[no-any-return]


def exchange(
    tensor: Tensor,
    ranks: TensorRanks,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
    *,
    gradient_factor: float = 1,
) -> Tensor:
    """Return the rows that all ranks send to this one; see `TensorRanks.exchange`. Called on all of them.

    Backward, which sends gradients back and multiplies them by `gradient_factor`, is called on all of them too.
    """
    return _Exchange.apply(tensor, ranks, sent, received, gradient_factor)  # type: ignore[no-any-return]


def gather(tensor: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    """Return the parts of all ranks, of one shape, joined along `dim`, for computing that differs between ranks.

    The gradient of a part is the sum over the ranks. Called on all of them.
    """
    return _Gather.apply(tensor, dim % tensor.dim(), ranks)  # type: ignore[no-any-return]
