"""An FSDP backend in this process, and a model of blocks to train with it."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.optim import Adam

from drivetrain_backends import AccumulationWindow, FSDPBackend, FSDPSettings, Prepared
from drivetrain_backends.state_dict.full_tensors import full_state_dict, full_tensor
from drivetrain_precision import PrecisionSettings, choose_policy
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


def fsdp(
    mode: str = "no",
    *,
    accumulation: int = 1,
    precision: PrecisionSettings | None = None,
    **settings: object,
) -> FSDPBackend:
    where = context()
    return FSDPBackend(
        where,
        choose_policy(mode, where.device, precision),
        window=AccumulationWindow(accumulation),
        settings=FSDPSettings(**settings),
    )


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


def train_window(backend: FSDPBackend, prepared: Prepared, first: int) -> list[float]:
    """Step after two micro-batches, of which the first is held back: the losses. Called on all ranks."""
    losses: list[float] = []
    for closes in (False, True):
        backend.window.begin()
        loss = loss_of(prepared.model, first + closes)
        losses.append(loss.item())
        if closes:
            prepared.backward(loss)
        else:
            with prepared.no_sync():
                prepared.backward(loss)
    prepared.optimizers[0].step()
    prepared.optimizers[0].zero_grad()
    return losses


def weights(prepared: object) -> dict[str, Tensor]:
    """The weights of a prepared model, whole. Called on all ranks."""
    return {name: full_tensor(value).clone() for name, value in prepared.state_dict()["model"].items()}


def trained(backend: object, state: object = None) -> tuple[dict[str, Tensor], object]:
    """Take up a state, if any, and train for two steps: the weights, and the state, whole. Called on all ranks."""
    model = stack(seed=0 if state is None else 9, tied=True)
    (prepared,) = backend.prepare([model], [Adam(model.parameters(), lr=0.05)], [])
    if state is not None:
        prepared.load_state_dict(state)
    for _ in range(2):
        backend.window.begin()
        prepared.backward(loss_of(prepared.model, 0))
        prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()
    assert model.head.weight is model.embedding.weight
    found, kept = weights(prepared), deepcopy(full_state_dict(prepared.state_dict()))
    backend.close()
    return found, kept
