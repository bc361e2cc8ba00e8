"""Blocks that are recomputed or compiled by one setting train as plain ones, under every backend."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import ParallelDims
from drivetrain_backends.modules.activation_checkpointing import checkpointing_of
from plain_loop.accelerated import DDP, FSDP, SINGLE, accelerator_of, take_steps, weights_of
from planned_models import Perceptron

NUM_STEPS = 3


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return (model(torch.randn(4, 6, generator=generator)) - 1).square().mean()


def start(
    backend: str, settings: dict[str, Any], model: nn.Module, **options: Any
) -> tuple[Any, nn.Module, Any]:
    accelerator = accelerator_of(backend, sections={"model": settings}, **options)
    return accelerator, *accelerator.prepare(model, SGD(model.parameters(), lr=0.1))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Perceptron(6)


def check(backend: str, settings: dict[str, Any], **options: Any) -> None:
    plain = model_of()
    optimizer = SGD(plain.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        loss_of(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = model_of()
    accelerator, prepared, optimizer = start(backend, settings, model, **options)
    take_steps(accelerator, prepared, optimizer, lambda step: loss_of(prepared, step), range(NUM_STEPS))
    found = weights_of(accelerator, prepared)
    assert found.keys() == plain.state_dict().keys()
    torch.testing.assert_close(found, dict(plain.state_dict()))
    block: Any = accelerator.unwrap_model(prepared).get_submodule("layers.0")
    assert checkpointing_of(block) == settings.get("activation_checkpointing", "none")
    assert ("forward" in vars(block)) == (settings.get("compile") == "blocks")
    accelerator.end_training()
    if backend != "fsdp":  # whose shards stay
        assert type(block) is nn.Sequential
    assert "forward" not in vars(block)


RECOMPUTED = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
COMPILED = {"compile": "blocks", "compile_backend": "aot_eager"}
WHOLE = {"compile": "whole", "compile_backend": "aot_eager"}


@pytest.mark.parametrize(
    "settings",
    [RECOMPUTED, SELECTIVE, COMPILED, WHOLE, RECOMPUTED | COMPILED],
    ids=["recomputed", "in part", "compiled", "whole", "both"],
)
@pytest.mark.parametrize("backend", [SINGLE, DDP, FSDP])
@pytest.mark.default_cases("single-whole", "ddp-in part", "ddp-compiled", "fsdp-recomputed", "fsdp-both")
def test_a_changed_model_trains_as_a_plain_one(backend: str, settings: dict[str, Any]) -> None:
    check(backend, settings)


@pytest.mark.ranks(2, timeout_seconds=170)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.default_cases("3")
def test_engines_train_a_changed_model_too(stage: int) -> None:
    check(f"deepspeed-{stage}", RECOMPUTED)


@pytest.mark.ranks(2)
def test_divided_layers_are_recomputed() -> None:
    check("ddp", RECOMPUTED, parallelism=ParallelDims(tensor=2))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's, compiling again
@pytest.mark.slow
def test_two_accelerators_change_a_model_in_a_row() -> None:
    model = model_of()
    for _ in range(2):
        accelerator, prepared, _ = start("single", RECOMPUTED | COMPILED, model)
        loss_of(prepared, 0).backward()
        accelerator.end_training()


@pytest.mark.parametrize("blocks", ["Linear", "layers.*.0"])
def test_blocks_are_named_by_their_class_or_by_a_pattern_of_their_names(blocks: str) -> None:
    model = model_of()
    with pytest.raises(
        ValueError,
        match=r"model\.blocks=Attention: no model has a module with parameters of .*Linear",
    ):
        start("single", RECOMPUTED | {"blocks": ("Attention",)}, model)
    with pytest.raises(ValueError, match=r"names near to it: layers\.\*\.\*, "):
        start("single", RECOMPUTED | {"blocks": ("layer.*.0",)}, model)
    accelerator, *_ = start("single", RECOMPUTED | {"blocks": (blocks,)}, model)
    kinds = {name: checkpointing_of(model.get_submodule(name)) for name in ("layers.0", "layers.0.0")}
    assert kinds == {"layers.0": "none", "layers.0.0": "full"}
    accelerator.end_training()


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (num_samples, 6) to the same shape."""
        return x + self.linear(x).tanh()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_that_are_alike_are_compiled_once_though_they_are_recomputed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = {"activation_checkpointing": "full", "compile": "blocks", "compile_backend": "aot_eager"}
    accelerator = accelerator_of("single", sections={"model": changes, "run": {"show_plan": True}})
    model = accelerator.prepare(nn.Sequential(nn.ModuleList(Block() for _ in range(10))))
    x = torch.ones(2, 6, requires_grad=True) * 1.0
    for block in model[0]:
        x = block(x)
    x.sum().backward()
    accelerator.end_training()
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("compiled")]
    assert said.startswith("compiled 1 graph in ")
    assert "again" not in said


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's, compiling again
def test_what_was_compiled_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    sections: Any = {"model": COMPILED, "run": {"show_plan": True}}
    accelerator = accelerator_of("single", sections=sections)
    model = accelerator.prepare(model_of())
    for size in (2, 3):
        model(torch.ones(size, 6))
    accelerator.end_training()
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("compiled")]
    assert "graphs in" in said
    assert "of them again, the last since" in said
    assert "tensor 'args[0]'" in said
