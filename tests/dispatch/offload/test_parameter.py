"""What `model.to` and its like do to a dispatched model: all of it as to any other, or nothing and an error."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dispatch.models import WIDTH, Gate, Stack, same_values, streamed
from drivetrain_dispatch import disk_offload, dispatch_model, remove_hooks
from drivetrain_dispatch.errors import OffloadedError

CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "meta": lambda model: model.to("meta"),
    "double": nn.Module.double,
    "half": nn.Module.half,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "type": lambda model: model.type(torch.float64),
    "to_empty": lambda model: model.to_empty(device="cpu"),
}
NO_CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "cpu": nn.Module.cpu,
    "float": nn.Module.float,
    "to": lambda model: model.to("cpu", torch.float32),
    "layout": lambda model: model.to(memory_format=torch.channels_last),
}


def kinds(model: nn.Module) -> dict[str, tuple[object, ...]]:
    return {
        name: (
            id(tensor),
            type(tensor),
            tensor.dtype,
            tensor.device,
            tensor.data_ptr() if tensor.numel() else 0,
        )
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).to(dtype)


def mixed(folder: Path) -> nn.Module:
    """Its parts stay, are used in place, and come and go, in this order."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Gate(), nn.Linear(WIDTH, WIDTH)
    ).eval()
    dtypes = {f"2.{name}": torch.float32 for name, _ in model[2].named_parameters()}
    return dispatch_model(model, {"1": "disk", "": "cpu"}, offload_dir=folder, dtypes=dtypes)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_of_which_parts_come_and_go_is_not_changed_at_all(
    change: Callable[[nn.Module], object], tmp_path: Path
) -> None:
    model = mixed(tmp_path)
    before, values, expected = kinds(model), copy.deepcopy(model.state_dict()), model(batch())
    for part in (model, model[2], model[2].inner):
        with pytest.raises(OffloadedError, match=r"moved or converted .* call remove_hooks\(model\) first"):
            change(part)
        assert kinds(model) == before
    assert torch.equal(model(batch()), expected)
    assert same_values(model.state_dict(), values)
    remove_hooks(model)
    assert "_apply" not in vars(model)
    change(model)


@pytest.mark.parametrize("change", NO_CHANGES.values(), ids=NO_CHANGES)
def test_what_changes_nothing_goes_on(change: Callable[[nn.Module], object], tmp_path: Path) -> None:
    model = mixed(tmp_path)
    before, expected = kinds(model), model(batch())
    change(model)
    assert kinds(model) == before
    assert torch.equal(model(batch()), expected)


@pytest.mark.parametrize("build", [lambda: nn.Conv2d(3, 4, 2), lambda: nn.Conv3d(3, 4, 2)])
def test_another_layout_is_a_change(build: Callable[[], nn.Module]) -> None:
    model = streamed(nn.Sequential(nn.Linear(3, 3), build()))
    before = kinds(model)
    dims = model[1].weight.dim()
    with pytest.raises(OffloadedError, match="moved or converted"):
        model.to(memory_format=torch.channels_last if dims == 4 else torch.channels_last_3d)
    assert kinds(model) == before


def test_parts_beside_those_that_come_and_go_are_changed(tmp_path: Path) -> None:
    model = mixed(tmp_path)
    model[1].double()
    assert model[1].weight.dtype == torch.float64


@pytest.mark.parametrize("change", [*CHANGES, *NO_CHANGES])
def test_weights_in_place_are_changed_as_any(change: str, tmp_path: Path) -> None:
    model = Stack()
    plain = copy.deepcopy(model)
    disk_offload(model, tmp_path)
    for one in (model, plain):
        (CHANGES | NO_CHANGES)[change](one)
    assert [(tensor.dtype, tensor.device) for tensor in model.parameters()] == [
        (tensor.dtype, tensor.device) for tensor in plain.parameters()
    ]
    if change not in ("meta", "to_empty"):
        x = batch(plain.layers[0].weight.dtype)
        assert torch.equal(model(x), plain(x))
        assert torch.equal(remove_hooks(model)(x), plain(x))
