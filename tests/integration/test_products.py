"""A run goes on at any other product of the dimensions of a mesh, as if it had never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain_state import ParallelDims
from parallel.models import Routed

PRODUCTS: dict[str, tuple[dict[str, Any], str, int]] = {
    "single": ({}, "single", 1),
    "ddp 3": ({}, "ddp", 3),
    "tensor 2": ({"tensor": 2}, "usual", 2),
    "tensor 3": ({"tensor": 3}, "usual", 3),
    "tensor 2 x data 2": ({"tensor": 2, "data": 2}, "ddp", 4),
    "tensor 2 x replicas": ({"tensor": 2, "data": 2}, "fsdp", 4),
    "tensor 2 x shard 2": ({"tensor": 2, "shard": 2}, "fsdp", 4),
    "context 2": ({"context": 2}, "usual", 2),
    "context 3 gathered": ({"context": 3, "context_method": "gathered"}, "fsdp", 3),
    "context 2 x shard 2": ({"context": 2, "shard": 2}, "fsdp", 4),
    "context 2 x tensor 2": ({"context": 2, "tensor": 2}, "ddp", 4),
    "shard 2": ({"shard": 2}, "fsdp", 2),
    "pipeline 2": ({"pipeline": 2}, "usual", 2),
    "pipeline 2 x shard 2": ({"pipeline": 2, "shard": 2}, "fsdp", 4),
    "pipeline 2 x tensor 2": ({"pipeline": 2, "tensor": 2}, "usual", 4),
    "expert 2": ({"shard": 2, "expert": 2}, "fsdp", 2),
    "expert 3": ({"shard": 3, "expert": 3}, "fsdp", 3),
    "expert 2 x shards": ({"shard": 4, "expert": 2}, "fsdp", 4),
}
# Of 65 words and 3 heads, two ranks hold 32 and 33, and 1 and 2.
STYLES = {"transformer.wte": "vocabulary", "lm_head": "vocabulary_column"}
STEPS = 5


class RoutedModel(nn.Module):
    """Two blocks of five experts, of which ranks hold two and three."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(65, 8), nn.Linear(8, 65)
        self.blocks = nn.Sequential(Routed(width=8), Routed(width=8))

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.head(self.blocks(self.words(input_ids))),)


def build(model_of: str) -> nn.Module:
    if model_of == "experts":
        torch.manual_seed(0)
        return RoutedModel().double()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 8, "vocab_size": 65}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)).double()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1])[0]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(
    product: str, model_of: str, folder: str, resume: bool, num_steps: int
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train some steps and save; return losses and norms, and the weights at the beginning and at the end."""
    sizes, backend, _ = PRODUCTS[product]
    parallelism = (
        ParallelDims(**sizes, tensor_styles=STYLES if "tensor" in sizes else None) if sizes else None
    )
    tokens = torch.randint(0, 65, (600, 9), generator=torch.Generator().manual_seed(1))
    with Accelerator(
        cpu=True,
        backend=None if backend == "usual" else backend,
        parallelism=parallelism,
        project_dir=folder,
        seed=0,
        data={"split_batches": True},
    ) as accelerator:
        model = build(model_of)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(tokens, batch_size=12)
        )
        if resume:
            accelerator.load_state()
        begin = accelerator.get_state_dict(model)
        steps: list[tuple[float, float]] = []
        for batch in loader:
            if "pipeline" in sizes:
                found = accelerator.train_step(batch, loss=loss_of, max_norm=1.0)
                loss, norm = found.loss, found.grad_norm
            else:
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean")
            steps.append((mean.item(), norm.item()))
            if len(steps) == num_steps:
                break
        accelerator.save_state()
        return steps, begin, accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    "chain",
    [
        ["tensor 2 x shard 2", "single"],
        ["tensor 2 x shard 2", "ddp 3", "tensor 2"],
        ["tensor 3", "single", "tensor 2 x data 2"],
        ["tensor 2", "tensor 2 x replicas", "tensor 3"],
        ["single", "tensor 2 x shard 2"],
        ["context 2", "tensor 2 x shard 2", "context 2 x tensor 2"],
        ["context 2 x shard 2", "context 3 gathered"],
        ["pipeline 2", "single", "pipeline 2 x shard 2"],
        ["tensor 2 x shard 2", "pipeline 2 x tensor 2", "ddp 3", "pipeline 2"],
        ["expert 2", "single"],
        ["expert 2 x shards", "shard 2", "expert 2"],
        ["expert 3", "expert 2", "expert 2 x shards"],
        ["ddp 3", "expert 2 x shards", "single"],
    ],
    ids=" then ".join,
)
@pytest.mark.default_cases("tensor 2 x shard 2 then single")
def test_a_run_goes_on_at_another_product(run_ranks, tmp_path: Path, chain: list[str]) -> None:
    model_of = "gpt2" if not any("expert" in product for product in chain) else "experts"
    whole = run_ranks(
        train,
        "single",
        model_of,
        str(tmp_path / "whole"),
        False,
        STEPS * len(chain),
        num_processes=1,
        timeout_seconds=150,
    )
    expected, _, weights = whole[0]
    found: list[tuple[float, float]] = []
    end: dict[str, torch.Tensor] = {}
    for number, product in enumerate(chain):
        folder = str(tmp_path / "chain")
        first, *_ = run_ranks(
            train,
            product,
            model_of,
            folder,
            number > 0,
            STEPS,
            num_processes=PRODUCTS[product][2],
            timeout_seconds=150,
        )
        steps, begin, now = first
        if end:
            assert all(torch.equal(value, end[name]) for name, value in begin.items())
        found, end = [*found, *steps], now
    assert found == [pytest.approx(step, abs=1e-9) for step in expected]
    for name, value in weights.items():
        torch.testing.assert_close(end[name], value, rtol=0, atol=1e-8)
