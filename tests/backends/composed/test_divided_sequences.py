"""Models whose sequences ranks divide train as whole ones under every strategy."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain_backends import BackendContract, DDPBackend, FSDPBackend, SingleBackend
from drivetrain_state import ParallelDims
from plain_loop.backends import context

BACKENDS = {"ddp": DDPBackend, "fsdp": FSDPBackend, "single": SingleBackend}
MESHES = {
    "context 2": ParallelDims(context=2),
    "context 3": ParallelDims(context=3),
    "data 2 x context 2": ParallelDims(data=2, context=2),
    "shard 2 x context 2": ParallelDims(shard=2, context=2),
    "context 2 x tensor 2": ParallelDims(context=2, tensor=2),
    "tensor 2": ParallelDims(tensor=2, sequence=True),
    "shard 2 x tensor 2": ParallelDims(shard=2, tensor=2, sequence=True),
}
NUM_RANKS = {"context 2": 2, "context 3": 3, "tensor 2": 2}
CASES = ("count, accumulated, clipped, uneven tails, 20 steps", "tied weights")
WIDTH = 4


class Block(nn.Module):
    """Causal attention of two heads, and a perceptron; maps (items, positions, WIDTH) to the same."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.num_heads = 2
        self.heads = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.mixed = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention."""
        heads = self.heads(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + torch.tanh(self.mixed(mixed.transpose(1, 2).flatten(2))) / 4


class SequenceLayer(nn.Module):
    """A layer from features to features, which it takes for a sequence."""

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(2))
        self.output = nn.Linear(num_inputs * WIDTH, num_outputs, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (items, num_inputs) to (items, num_outputs)."""
        states = x.unsqueeze(-1) * self.weight
        for block in self.blocks:
            states = block(states)
        return (
            self.output(torch.tanh(states).flatten(1)) / 4
        )  # small, so that rounding does not grow by training


def contract(kind: str, mesh: str, is_whole: bool) -> None:
    class Contract(BackendContract):
        backend = BACKENDS[kind]
        layer = SequenceLayer

    with context(parallelism=MESHES[mesh]) as where:
        if is_whole:
            Contract().check_all(where)
        for name in () if is_whole else CASES:
            Contract().check_case(where, name, Contract.cases[name])


@pytest.mark.parametrize("is_whole", [False, True], ids=["two cases", "whole"])
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("ddp", "context 2"),
        ("fsdp", "context 2"),
        ("ddp", "context 3"),
        ("ddp", "data 2 x context 2"),
        ("fsdp", "shard 2 x context 2"),
        ("ddp", "context 2 x tensor 2"),
        ("fsdp", "context 2 x tensor 2"),
        ("single", "tensor 2"),
        ("fsdp", "shard 2 x tensor 2"),
    ],
)
@pytest.mark.default_cases("ddp-context 2-two cases", "single-tensor 2-two cases")
def test_the_contract_holds_on_divided_sequences(run_ranks, kind: str, mesh: str, is_whole: bool) -> None:
    run_ranks(contract, kind, mesh, is_whole, num_processes=NUM_RANKS.get(mesh, 4), timeout_seconds=170)
