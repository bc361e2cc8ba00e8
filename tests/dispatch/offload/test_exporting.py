"""A program made of a dispatched model computes what the model does, or whoever makes it is told what to do."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dispatch.models import WIDTH, Gate, streamed
from drivetrain_dispatch import disk_offload, dispatch_model, remove_hooks
from drivetrain_dispatch.errors import OffloadedError


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), Gate()

    def encode(self, x: Tensor) -> Tensor:
        return self.first(x)

    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        return self.gate(self.encode(x)) * scale


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Scaled().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


@pytest.fixture(autouse=True)
def told_of_the_future() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", FutureWarning)
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        yield


def exported(model: nn.Module, x: Tensor) -> Callable[..., Tensor]:
    return torch.export.export(model, (x,)).module()


def exported_strictly(model: nn.Module, x: Tensor) -> Callable[..., Tensor]:
    return torch.export.export(model, (x,), strict=True).module()


def traced(model: nn.Module, x: Tensor) -> Callable[..., Tensor]:
    return torch.jit.trace(model, (x,))


@pytest.mark.parametrize("make", [exported, exported_strictly, traced])
@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.default_cases("disk-exported", "cpu-exported_strictly")
def test_weights_that_stay_become_a_program(
    model: nn.Module, x: Tensor, home: str, make: Callable[[nn.Module, Tensor], nn.Module], tmp_path: Path
) -> None:
    expected = model(x)
    dispatch_model(model, {"": home}, offload_dir=tmp_path)
    program = make(model, x)
    assert torch.equal(program(x), expected)
    assert torch.equal(model(x), expected)
    assert torch.equal(program(3 * x), model(3 * x))


def test_a_program_knows_the_arguments(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    expected = model(x, scale=3.0)
    disk_offload(model, tmp_path)
    program = torch.export.export(model, (x,), {"scale": 3.0}, dynamic_shapes={"x": None, "scale": None})
    assert [spec.arg.name for spec in program.graph_signature.input_specs][-2:] == ["x", "scale"]
    assert torch.equal(program.module()(x, scale=3.0), expected)


@pytest.mark.parametrize(
    ("make", "error"),
    [(exported, OffloadedError), (traced, OffloadedError), (exported_strictly, RuntimeError)],
)
def test_weights_that_come_and_go_become_none(
    model: nn.Module, x: Tensor, make: Callable[[nn.Module, Tensor], object], error: type[Exception]
) -> None:
    expected = model(x)
    streamed(model)
    with pytest.raises(error, match=r"call\s+remove_hooks\(model\) first"):
        make(model, x)
    assert torch.equal(model(x), expected)
    remove_hooks(model)
    assert torch.equal(exported(model, x)(x), expected)


def test_a_part_whose_weights_come_and_go_becomes_none(model: nn.Module, x: Tensor) -> None:
    expected = model.first(x)
    streamed(model)
    with pytest.raises(OffloadedError, match=r"call remove_hooks\(model\) first"):
        exported(model.first, x)
    assert torch.equal(model.first(x), expected)


@pytest.mark.parametrize("way", [streamed, lambda model: disk_offload(model, ".")])
def test_a_script_is_refused(
    model: nn.Module, way: Callable[[nn.Module], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        AttributeError, match=r"torch.jit.script cannot compile .* call remove_hooks\(model\)"
    ):
        torch.jit.script(way(model))


def test_a_symbolic_trace_calls_the_parts(model: nn.Module, x: Tensor) -> None:
    expected = model(x)
    assert torch.equal(torch.fx.symbolic_trace(streamed(model))(x), expected)
