"""A checkpoint of divided layers is that of whole tensors: any number of ranks goes on from it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from drivetrain_megatron import megatron_from_transformers, transformers_from_megatron
from drivetrain_state import ParallelDims
from megatron_layers import column_layer, row_layer
from megatron_models import config_of, losses_of, model_of, tokens
from megatron_on_cpu import megatron_on_cpu
from plain_loop.accelerated import accelerator_of

NUM_STEPS, SAVED_AT = 4, 2


def train(kind: str, sizes: dict[str, int], folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """Train steps `first` to `last`, from the folder if there were steps before; save, and return weights."""
    with megatron_on_cpu():
        accelerator = accelerator_of("megatron", parallelism=ParallelDims(**sizes))
        source = model_of(kind, seed=0 if first == 0 else 1).train()  # what is loaded replaces every weight
        model = megatron_from_transformers(source)
        model, _ = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
        if first:
            accelerator.load_state(folder)
        reads = accelerator.context.ranks("reads")
        for step in range(first, last):
            ids = tokens(4, seed=10 + step).chunk(reads.size)[reads.index]
            accelerator.train_step(
                {"ids": ids}, loss=lambda model, piece: losses_of(model, piece["ids"]).mean()
            )
        if not first:
            accelerator.save_state(folder)
        weights = accelerator.get_state_dict(model, everywhere=True)
        accelerator.end_training()
    return weights


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("before", ["tensor", "pipeline"])
@pytest.mark.default_cases("tensor-llama")
def test_any_product_goes_on_from_a_checkpoint_of_parts(
    before: str, kind: str, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    run = partial(run_ranks, train, kind, timeout_seconds=150)
    saved, _ = run({before: 2}, tmp_path, 0, SAVED_AT)
    steps = (tmp_path, SAVED_AT, NUM_STEPS)
    found = {axis: run({axis: 2}, *steps)[0] for axis in ("tensor", "pipeline", "data")}
    (found["alone"],) = run({}, *steps, num_processes=1)
    for name, weights in found.items():
        assert weights.keys() == saved.keys()
        for key, value in weights.items():
            torch.testing.assert_close(value, found["alone"][key], rtol=0, atol=5e-5, msg=f"{name}: {key}")
        assert any(not torch.equal(value, saved[key]) for key, value in weights.items()), (
            "nothing was trained"
        )


def load_only(kind: str, sizes: dict[str, int], folder: Path) -> dict[str, Tensor]:
    return train(kind, sizes, folder, SAVED_AT, SAVED_AT)


def test_weights_are_read_bit_for_bit_at_other_sizes(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    saved, again = run_ranks(train, "tied llama", {"tensor": 2}, tmp_path, 0, 1, timeout_seconds=150)
    (alone,) = run_ranks(load_only, "tied llama", {}, tmp_path, num_processes=1, timeout_seconds=150)
    for key, value in saved.items():
        assert torch.equal(value, again[key]), key
        assert torch.equal(value, alone[key]), key
    back = transformers_from_megatron(saved, config_of("tied llama"))
    assert torch.equal(
        back.lm_head.weight, saved["embedding.word_embeddings.weight"][: len(back.lm_head.weight)]
    )


class TwoLayers(nn.Module):
    """A model of a user's own, whose layers Megatron divides if there are ranks for that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = column_layer(6, 8, dtype=torch.float64)
        self.last = row_layer(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def train_own(backend: str, sizes: dict[str, int], folder: Path, first: int, last: int) -> dict[str, Tensor]:
    with megatron_on_cpu():
        accelerator = accelerator_of(backend, parallelism=ParallelDims(**sizes) if sizes else None)
        torch.manual_seed(first)
        model = TwoLayers()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
        if first:
            accelerator.load_state(folder)
        for step in range(first, last):
            torch.manual_seed(step)
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(5, 6, dtype=torch.float64)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        if not first:
            accelerator.save_state(folder)
        weights = accelerator.get_state_dict(model, everywhere=True)
        accelerator.end_training()
    return weights


def test_plain_layers_in_one_process_go_on_from_divided_ones(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    run_ranks(train_own, "megatron", {"tensor": 2}, tmp_path, 0, SAVED_AT, timeout_seconds=150)
    divided, _ = run_ranks(
        train_own, "megatron", {"tensor": 2}, tmp_path, SAVED_AT, NUM_STEPS, timeout_seconds=150
    )
    (plain,) = run_ranks(
        train_own, "single", {}, tmp_path, SAVED_AT, NUM_STEPS, num_processes=1, timeout_seconds=150
    )
    assert plain.keys() == divided.keys() == {"first.weight", "first.bias", "last.weight", "last.bias"}
    for key, value in plain.items():
        torch.testing.assert_close(value, divided[key], rtol=0, atol=1e-12, msg=key)
