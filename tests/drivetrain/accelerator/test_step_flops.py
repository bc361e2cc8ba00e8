"""Model FLOPs of a step: the same on any number of ranks, under every backend and parallel dimension."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from drivetrain_state import ParallelDims
from plain_loop.accelerated import accelerator_of

PEAK = 1e9
GLOBAL_BATCH, LENGTH, WIDTH, NUM_BLOCKS = 8, 8, 16, 3


class Block(nn.Module):
    """Attention and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(2, 3)
        return x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def flops_of_a_step(
    backend: str,
    sections: dict[str, Any],
    accumulation: int = 1,
    evaluates: bool = False,
    parallelism: ParallelDims | None = None,
) -> float:
    """Train two steps of the same global batch at any number of ranks; return the operations of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))), nn.Linear(WIDTH, WIDTH))
    sections = {"tracking": {"throughput": True, "peak_flops": PEAK}, **sections}
    with accelerator_of(
        backend, gradient_accumulation_steps=accumulation, sections=sections, parallelism=parallelism
    ) as accelerator:
        batch_size = GLOBAL_BATCH // accelerator.context.ranks("reads").size // accumulation
        data = TensorDataset(torch.randn(2 * GLOBAL_BATCH, LENGTH, WIDTH))
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), DataLoader(data, batch_size)
        )
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                if evaluates:
                    with torch.no_grad():
                        model(x)
                optimizer.step()
                optimizer.zero_grad()
        total = accelerator.total_throughput
        assert total.mfu is not None
        assert total.steps_per_second is not None
        return total.mfu * PEAK * accelerator.num_processes / total.steps_per_second


def in_theory() -> float:
    """Return the operations by formula: of weights three times those of their forward, of attention as well.

    The gradient of the input of the first block's first layer is not needed.
    """
    tokens = GLOBAL_BATCH * LENGTH
    weights = 2 * tokens * (3 * WIDTH * WIDTH + WIDTH * WIDTH)
    scores = 2 * 2 * GLOBAL_BATCH * LENGTH * LENGTH * WIDTH
    of_head = 3 * 2 * tokens * WIDTH * WIDTH
    return NUM_BLOCKS * 3 * (weights + scores) - 2 * tokens * 3 * WIDTH * WIDTH + of_head


def test_one_process_counts_what_the_formula_says() -> None:
    assert flops_of_a_step("single", {}) == pytest.approx(in_theory())
    assert flops_of_a_step("single", {}, 2, True) == pytest.approx(in_theory())


FULL, SELECTIVE = ({"activation_checkpointing": kind} for kind in ("full", "selective"))
SHARDED = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "fsdp-full": ("fsdp", {"model": FULL}),
    "fsdp-selective": ("fsdp", {"model": SELECTIVE}),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.default_cases("fsdp-selective-2")
def test_ranks_count_together_what_one_does(kind: str, accumulation: int) -> None:
    assert flops_of_a_step(*SHARDED[kind], accumulation) == pytest.approx(in_theory(), rel=0.02)


DIMENSIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("single", 2, {"tensor": 2}),
    ("single", 2, {"tensor": 2, "sequence": True}),
    ("ddp", 2, {"context": 2}),
    ("fsdp", 2, {"context": 2}),
    ("fsdp", 4, {"context": 2, "tensor": 2}),
    ("fsdp", 4, {"shard": 2, "tensor": 2}),
]


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        pytest.param(backend, sizes, marks=pytest.mark.ranks(number), id=f"{backend} {', '.join(sizes)}")
        for backend, number, sizes in DIMENSIONS
    ],
)
@pytest.mark.default_cases("single tensor, sequence", "ddp context")
def test_ranks_that_divide_a_model_count_it_once(backend: str, sizes: dict[str, Any]) -> None:
    """What each rank computes whole, as a head beside divided layers, or of its own rows, counts once."""
    found = flops_of_a_step(backend, {}, parallelism=ParallelDims(**sizes))
    assert found == pytest.approx(in_theory(), rel=0.02)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout_seconds=150)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_counts_what_one_process_does(stage: int) -> None:
    sections = {"deepspeed": {"stage": stage}, "model": FULL}
    assert flops_of_a_step("deepspeed", sections, 2) == pytest.approx(in_theory(), rel=0.02)
