"""Compiled models, whole or by block, and activations that are computed again: the losses are the eager model's."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain import Accelerator
from drivetrain_backends.settings import ModelSettings
from hardware.devices import OnDevice, here

# What compiles on each kind; inductor has no code for the simulated device.
COMPILERS = {"cuda": "inductor", "npu": "aot_eager"}


class Block(nn.Module):
    """A layer with dropout; (items, 8) to (items, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.layer(x).tanh())


class Model(nn.Module):
    """Three blocks; (items, 8) to (items, 8).

    Args:
        drops: Whether dropout is on.
        again: Whether each block's activations are computed again in backward.
    """

    def __init__(self, *, drops: bool, again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.again = again
        for block in self.blocks:
            assert isinstance(block, Block)
            block.dropout.p = 0.25 if drops else 0.0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def losses(
    backend: str,
    mode: str,
    options: dict[str, object],
    *,
    drops: bool = False,
    again: bool = False,
    whole: bool = False,
    changes: ModelSettings | None = None,
) -> list[float]:
    """Train four steps; the losses."""
    sections = {
        "run": {"show_plan": False},
        "model": changes or ModelSettings(),
        **({"fsdp": options} if backend == "fsdp" else {}),
    }
    accelerator = Accelerator(backend=backend, mixed_precision=mode, seed=7, sections=sections)
    torch.manual_seed(0)
    model: nn.Module = Model(drops=drops, again=again)
    if whole:
        compiled = torch.compile(model, backend=COMPILERS[here().name])
        assert isinstance(compiled, nn.Module)
        model = compiled
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    x = torch.randn(4, 8).to(accelerator.device)
    torch.manual_seed(1)
    found: list[Tensor] = []
    for _ in range(4):
        loss = (model(x).float() - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    accelerator.end_training()
    return [loss.item() for loss in found]


def compare_compiled(backend: str) -> None:
    from torch._dynamo.utils import counters  # takes seconds

    blocks = {"wrap": ["Block"]}
    for mode, tolerance in (("no", 1e-4), ("bf16", 2e-2)):
        expected = losses(backend, mode, blocks)
        assert expected[-1] < expected[0]
        torch._dynamo.reset()
        counters.clear()
        found = {"whole": losses(backend, mode, blocks, whole=True)}
        if backend == "fsdp":
            by_block = ModelSettings(compile="blocks", compile_backend=COMPILERS[here().name])
            found["by block"] = losses(backend, mode, blocks, changes=by_block)
        assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
        for name, values in found.items():
            assert values == pytest.approx(expected, rel=tolerance), f"{name} in {mode}"


def compare_computed_again(backend: str) -> None:
    plain = partial(losses, backend, "no", drops=True)
    expected = plain({"wrap": ["Block"]})
    found = {"in the model": plain({"wrap": ["Block"]}, again=True)}
    if backend == "fsdp":
        for which in ("full", "selective"):
            changes = ModelSettings(activation_checkpointing=which)
            found[which] = plain({"wrap": ["Block"]}, changes=changes)
    for name, values in found.items():
        assert values == pytest.approx(expected, rel=1e-6), name


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_eager_one(on_device: OnDevice) -> None:
    on_device(compare_compiled, "single")


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.default_cases
def test_a_compiled_model_trains_on_ranks_as_the_eager_one(on_device: OnDevice, backend: str) -> None:
    on_device(compare_compiled, backend, num_processes=2, timeout_seconds=240)


@pytest.mark.default_cases
def test_dropout_is_drawn_alike_where_activations_are_computed_again(on_device: OnDevice) -> None:
    on_device(compare_computed_again, "single")
    for backend in ("ddp", "fsdp"):
        on_device(compare_computed_again, backend, num_processes=2)
