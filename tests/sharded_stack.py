"""An FSDP backend in this process, and a model of blocks to train with it."""

import torch
from torch import Tensor, nn

from drivetrain_backends import AccumulationWindow, FSDPBackend, FSDPSettings
from drivetrain_precision import choose_policy
from drivetrain_state import Context, StateSettings, connect


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


def context() -> Context:
    return connect(StateSettings(device="cpu", watchdog=False), needs_group=True)


def fsdp(mode: str = "no", *, accumulation: int = 1, **settings: object) -> FSDPBackend:
    where = context()
    return FSDPBackend(
        where,
        choose_policy(mode, where.device),
        window=AccumulationWindow(accumulation),
        settings=FSDPSettings(**settings),
    )
