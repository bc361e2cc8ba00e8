"""Runs whose steps are skipped, under every backend: which layer is named, on which ranks, and which runs go on."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain_backends import (
    NonFiniteGradientError,
)
from drivetrain_backends.settings import ModelSettings
from drivetrain_precision import PrecisionSettings, SkippedStepsError
from plain_loop.backends import backend_of, prepare_sgd


class Block(nn.Sequential):
    """A linear layer and its activation; FSDP shards each on its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU())


class Net(nn.Module):
    """Three blocks and a head; the second block's layer overflows fp16 where an input is 1 or more."""

    def __init__(self, *, overflows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            self.blocks[0][0].weight.fill_(1.0)
            self.blocks[1][0].weight.fill_(1e4 if overflows else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (num_samples, 8) to (num_samples, 1)."""
        return self.head(self.blocks(x))


def make(kind: str, mode: str, settings: PrecisionSettings, nonfinite: Any = "warn") -> Any:
    section: dict[str, Any] = {"wrap": ["Block"]} if kind == "fsdp" else {}
    changes = ModelSettings(activation_checkpointing="full") if kind == "fsdp" else None
    return backend_of(kind, mode, precision=settings, on_nonfinite=nonfinite, changes=changes, **section)


def run(
    kind: str,
    inputs: list[float],
    *,
    overflows: bool = False,
    factor: float = 1.0,
    mode: str = "fp16",
    nonfinite: str = "warn",
    **settings: float | None,
) -> tuple[str, list[bool], float]:
    """The error of a run, which of its steps were skipped, and its last loss scale."""
    backend, _model, prepared = prepare_sgd(
        make(kind, mode, PrecisionSettings(**settings), nonfinite), Net(overflows=overflows), lr=0.0
    )
    (optimizer,) = prepared.optimizers
    skipped: list[bool] = []
    said = ""
    try:
        for x in inputs:
            prepared.backward(prepared.model(torch.full((2, 8), x)).float().mean() * factor)
            optimizer.step()
            skipped.append(optimizer.was_skipped)
            optimizer.zero_grad()
    except (SkippedStepsError, NonFiniteGradientError) as error:
        said = f"{type(error).__name__}: {error}"
    left = [
        module
        for module in prepared.unwrap().modules()
        for hook in module._forward_hooks.values()
        if "scaling" in type(hook).__module__
    ]
    scale = 0.0 if backend.scaler is None else backend.scaler.value
    assert said or not left or "watch_underflow" in settings
    backend.close()
    return said, skipped, scale


def overflowing(kind: str, bad_rank: int | None) -> tuple[str, list[bool], float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    x = 1.0 if bad_rank in (None, rank) else 0.0
    return run(kind, [x] * 20, overflows=True, initial_scale=8.0)


NAMED = "is the output of blocks.1.0 (Linear, float16), whose inputs were finite"


def test_a_layer_that_overflows_at_every_scale_ends_a_run_on_one_device_with_its_name() -> None:
    said, skipped, scale = overflowing("single", None)
    assert said.startswith(
        "SkippedStepsError: the gradients of Net were not finite in 4 steps one after another"
    )
    assert f"The first value that is not finite {NAMED}. Train in mixed_precision='bf16'" in said
    assert (skipped, scale) == ([True] * 3, 1.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(("bad_rank", "ranks"), [(None, "ranks 0, 1"), (1, "rank 1")])
def test_ranks_end_together_and_tell_the_rank_where_the_layer_overflows(
    kind: str, bad_rank: int | None, ranks: str
) -> None:
    said, skipped, scale = overflowing(kind, bad_rank)
    assert f"{NAMED}, on {ranks}. Train in mixed_precision='bf16'" in said
    assert (skipped, scale) == ([True] * 3, 1.0)


@pytest.mark.parametrize(
    "kind", ["single", *(pytest.param(kind, marks=pytest.mark.ranks(2)) for kind in ("ddp", "fsdp"))]
)
@pytest.mark.default_cases("ddp", "single")
def test_a_run_that_finds_its_scale_goes_on(kind: str) -> None:
    said, skipped, scale = run(kind, [1.0] * 16, factor=500.0)
    assert said == ""
    num_skipped = sum(skipped)
    assert 3 <= num_skipped <= 12
    assert skipped == [True] * num_skipped + [False] * (16 - num_skipped)
    assert scale == 65536.0 / 2**num_skipped


def test_a_run_without_a_loss_scale_that_skips_all_steps_ends_too() -> None:
    nan = float("nan")
    inputs = [nan, nan, 1.0, nan, nan, nan]
    said, skipped, _ = run("single", inputs, mode="bf16", nonfinite="skip", max_skipped_steps=3)
    assert skipped == [True, True, False, True, True]
    assert (
        "precision.max_skipped_steps=3. The first value that is not finite is the input of the model (Net"
        in said
    )
    assert "bf16" not in said.partition("Look at")[2]


def test_an_error_at_once_names_the_layer_where_layers_are_watched() -> None:
    inputs = [1.0, float("nan")]
    plain, _, _ = run("single", inputs, mode="bf16", nonfinite="raise")
    assert (
        "The first value that was not finite is the input of the model (Net, float32): it comes from" in plain
    )
    said, skipped, _ = run("single", inputs, mode="bf16", nonfinite="raise", watch_underflow=100)
    assert skipped == [False]
    assert said.startswith(
        "NonFiniteGradientError: the gradients of 4 of 8 parameters (from blocks.0.0.weight to head.weight) hold"
    )
    assert (
        "The first value that was not finite is the input of the model (Net, float32): it comes from the ba"
        in said
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_rank_0_logs_the_underflow_of_all_ranks(kind: str) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("drivetrain_precision")
    logger.addHandler(handler)
    said, _, _ = run(kind, [1.0] * 3, factor=1e-7, watch_underflow=2)
    logger.removeHandler(handler)
    assert said == ""
    assert len(records) == (dist.get_rank() == 0)
    for table in records:
        assert table.startswith("gradients of the last 2 steps by layer")
        row = next(line for line in table.splitlines() if line.startswith("blocks.2.0 "))
        assert int(row.split()[3]) == 2 * 2 * (2 * 8 + 8 * 8 + 8)  # steps, ranks, outputs and parameters


def test_closing_a_backend_takes_the_hooks_off() -> None:
    backend = make("single", "fp16", PrecisionSettings(watch_underflow=1))
    model = Net(overflows=False)
    backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    assert model.head._forward_hooks
    backend.close()
    assert not model.head._forward_hooks
