"""A model of blocks, and a loss of it for each rank."""

from functools import partial

import torch
from torch import Tensor, nn

from plain_loop.case import Case


class Block(nn.Module):
    """A linear layer with a residual; maps (items, width) to (items, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Blocks between an embedding and a head; maps (items,) of token numbers to (items, tokens)."""

    def __init__(self, *, width: int = 6, depth: int = 2, tokens: int = 5, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, tokens, bias=False)
        self.register_buffer("shift", torch.full((), 0.5))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(seed: int = 0, **options: object) -> Stack:
    """A model; equal seeds give equal weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Stack(**options)


def tokens(rank: int, tokens: int = 5) -> Tensor:
    """Four token numbers that differ by rank."""
    return (torch.arange(4) + rank) % tokens


class Scaled(Stack):
    """A stack with a scalar and an empty parameter, which FSDP cannot divide, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.ones(1, 5))
        self.empty = nn.Parameter(torch.ones(0, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale * self.row + self.empty.sum()


def scaled() -> Scaled:
    """A `Scaled` of float64, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Scaled().double()


def loss_of(model: nn.Module, rank: int) -> Tensor:
    """The loss of a rank's tokens."""
    return model(tokens(rank)).square().mean()


def loss_of_batch(model: nn.Module, rank: int, number: int) -> Tensor:
    """The loss of a rank's micro-batch."""
    return loss_of(model, rank + number)


CASE = Case(build=partial(stack, 0), loss=loss_of_batch)
