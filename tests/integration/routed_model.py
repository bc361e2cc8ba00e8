"""A small model with the parts that are kept in fp32 (norms, a router), and a plain loop that trains it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from drivetrain_precision import Bf16Updates, PrecisionSettings, choose_policy, find_islands, keep_in_fp32
from drivetrain_precision.dtypes.holding import hold

WIDTH = 8
KEPT = ("*.norm", "router")
CPU = torch.device("cpu")


class Block(nn.Module):
    """A norm and a linear layer, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Router(nn.Module):
    """Weights of the blocks, of (items, blocks); notes the dtypes of what it is given and of its products."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, num_blocks)
        self.register_buffer("table", torch.ones(num_blocks))
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x) * self.table
        self.seen.add(str(logits.dtype))
        return logits.softmax(-1)


class Routed(nn.Module):
    """Blocks whose outputs are mixed by a router; maps (items, width) to a dict of (items, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.router = Router(2)
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + self.shift
        shares = self.router(x)
        mixed = torch.zeros_like(x)
        for index, block in enumerate(self.blocks):
            mixed = mixed + shares[:, index, None] * block(x)
        return {"out": mixed}


def routed() -> tuple[Routed, Optimizer]:
    """The model, always with the same weights, and its optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Routed()
    return model, AdamW(model.parameters(), lr=1e-3)


def batches(rank: int, steps: int) -> Iterator[Tensor]:
    """The inputs of a rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        yield torch.randn(4, WIDTH, generator=generator)


def loss_of(output: dict[str, Tensor]) -> Tensor:
    """A loss in fp32."""
    return (output["out"].float() - 1.0).square().mean()


def train_plainly(
    update: str, *, num_ranks: int, steps: int, reduce_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The weights of a plain loop in pure bf16, with gradients averaged over ranks in `reduce_dtype`."""
    model, optimizer = routed()
    policy = choose_policy(
        "no", CPU, PrecisionSettings(param_dtype="bf16", buffer_dtype="bf16", keep_fp32=KEPT)
    )
    islands = find_islands([model], KEPT)[model]
    keep_in_fp32(islands, CPU, outside=torch.bfloat16)
    hold(model, policy.dtypes, islands)
    updates = Bf16Updates(update)
    inputs = [list(batches(rank, steps)) for rank in range(num_ranks)]
    for step in range(steps):
        means = [torch.zeros_like(p, dtype=reduce_dtype) for p in model.parameters()]
        for rank in range(num_ranks):
            model.zero_grad()
            loss_of(model(inputs[rank][step].bfloat16())).backward()
            for mean, parameter in zip(means, model.parameters(), strict=True):
                mean += parameter.grad.to(reduce_dtype) / num_ranks
        for mean, parameter in zip(means, model.parameters(), strict=True):
            parameter.grad = mean.to(parameter.dtype)
        updates.step(optimizer)
    return {name: value.clone() for name, value in model.state_dict().items()}
