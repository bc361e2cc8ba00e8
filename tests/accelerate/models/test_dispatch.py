"""Models that are dispatched, and what libraries find of them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain_accelerate.models import load_weights
from drivetrain_accelerate.models.align_devices import AlignDevicesHook, has_offloaded_params
from drivetrain_accelerate.models.load_weights import init_empty_weights, init_on_device
from drivetrain_accelerate.models.model_dispatch import (
    DispatchedHook,
    cpu_offload,
    disk_offload,
    dispatch_model,
)
from drivetrain_accelerate.models.module_hooks import (
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from drivetrain_accelerate.models.offload_folder import offload_state_dict
from drivetrain_dispatch.errors import WeightsMismatchError

theirs = pytest.importorskip("accelerate")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


X = torch.arange(8.0).view(2, 4)
SPREAD: dict[str, Any] = {"a": "cpu", "norm": "cpu", "b": "disk"}


@pytest.fixture
def plain() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.mark.parametrize("written_by", ["dispatch", "folder", "theirs", "state_dict", "index"])
def test_weights_come_from_wherever_they_are(plain: Model, written_by: str, tmp_path: Path) -> None:
    model, values, options = copy.deepcopy(plain), plain.state_dict(), dict[str, Any](offload_dir=tmp_path)
    if written_by != "dispatch":
        model.b.to("meta")
    if written_by == "folder":
        offload_state_dict(tmp_path, values)
    elif written_by == "theirs":
        theirs.utils.offload_state_dict(tmp_path, values)
    elif written_by == "state_dict":
        options["state_dict"] = values
    elif written_by == "index":
        save_file(values, path := tmp_path / "w.safetensors")
        entry = {"safetensors_file": str(path), "dtype": "float32"}
        options = {
            "offload_index": {name: {**entry, "weight_name": name} for name in values if name[0] == "b"}
        }
    dispatch_model(model, dict(SPREAD), **options)
    assert torch.equal(model(X), plain(X))
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert any(tmp_path.glob("offloaded-*")) == (written_by in ("dispatch", "state_dict"))
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), plain(X))


def test_libraries_find_hooks_and_the_map(plain: Model, tmp_path: Path) -> None:
    real = copy.deepcopy(plain)
    theirs.dispatch_model(real, dict(SPREAD), offload_dir=tmp_path / "theirs")
    model = dispatch_model(plain, dict(SPREAD), offload_dir=tmp_path / "ours")
    assert model.hf_device_map == real.hf_device_map
    for name, module in model.named_modules():
        other: Any = real.get_submodule(name)
        if list(module.parameters(recurse=False)):
            assert isinstance(module._hf_hook, AlignDevicesHook)
            devices = {torch.device(each._hf_hook.execution_device) for each in (module, other)}
            assert devices == {torch.device("cpu")}
            assert hasattr(module, "_old_forward")
    assert model._hf_hook.io_same_device == real._hf_hook.io_same_device
    assert torch.equal(model.a._old_forward(X), model.a(X))
    remove_hook_from_module(model, recurse=True)
    assert set(vars(model)) == set(vars(Model())) | {"hf_device_map"}


def test_hooks_are_added_to_a_dispatched_model_and_removed(plain: Model, tmp_path: Path) -> None:
    expected = plain(X)

    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    model = dispatch_model(plain, dict(SPREAD), offload_dir=tmp_path)
    add_hook_to_module(model.b[1], Doubling())
    add_hook_to_module(model, Doubling(), append=True)
    assert torch.equal(model(X), expected * 4)
    remove_hook_from_module(model.b[1])
    assert torch.equal(model(X), expected * 2)
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), expected)
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    assert torch.equal(model(X), expected)
    assert dispatch_model(model, {"": "cpu"}) is model  # a second dispatch replaces the first
    assert torch.equal(model(X), expected)
    assert set(vars(model)) == {*vars(Model()), "hf_device_map"}  # and needs no hooks on one device
    assert model.hf_device_map == {"": "cpu"}


@pytest.mark.parametrize(
    ("device_map", "said"),
    [(SPREAD, "offload_dir"), ({"": "disk"}, "offload_dir"), ({"a": "cpu"}, "norm.weight")],
)
def test_maps_that_cannot_be_followed_are_the_same_errors(plain: Model, device_map: Any, said: str) -> None:
    for dispatch in (dispatch_model, theirs.dispatch_model):
        with pytest.raises(ValueError, match=said):
            dispatch(copy.deepcopy(plain), dict(device_map))


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_a_model_is_offloaded_as_a_whole(plain: Model, offload: Callable[..., Model], tmp_path: Path) -> None:
    expected = plain(X)
    folder = {"offload_dir": tmp_path} if offload is disk_offload else {}
    model = offload(plain, **folder)
    assert torch.equal(model(X), expected)
    assert isinstance(model._hf_hook, AlignDevicesHook)
    assert not hasattr(model, "hf_device_map")
    remove_hook_from_submodules(model)
    assert not hasattr(model, "_hf_hook")


def test_a_hook_copied_to_another_module_is_one_of_its_own(plain: Model, tmp_path: Path) -> None:
    hook = dispatch_model(plain, dict(SPREAD), offload_dir=tmp_path).b[0]._hf_hook
    fresh = DispatchedHook(execution_device=hook.execution_device, io_same_device=hook.io_same_device)
    layer = add_hook_to_module(nn.Linear(4, 4), fresh)
    assert layer(X).shape == X.shape
    assert fresh.weights_map is None
    assert not has_offloaded_params(layer)
    with pytest.raises(ValueError, match="the dispatch of the model says"):
        fresh.offload = True


def test_models_are_built_without_memory_or_on_a_device() -> None:
    with init_empty_weights():
        assert all(each.is_meta for each in Model().parameters())
        assert not Model().norm.running_mean.is_meta
    with init_empty_weights(include_buffers=True):
        assert Model().norm.running_mean.is_meta
    with init_on_device(torch.device("meta")):
        assert Model().a.weight.is_meta


@pytest.mark.parametrize("device_map", ["auto", "sequential", {"": "cpu"}, SPREAD, None])
def test_a_checkpoint_is_loaded_and_dispatched(plain: Model, device_map: Any, tmp_path: Path) -> None:
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = Model()
    load_weights.load_checkpoint_and_dispatch(
        model, tmp_path, device_map, {"cpu": 250} if device_map == "auto" else None
    )
    assert torch.equal(model.eval()(X), plain(X))
    assert getattr(model, "hf_device_map", None) == device_map or device_map in ("auto", "sequential")
    assert not list(tmp_path.glob("offloaded-*"))  # the checkpoint's own file is used


def test_a_load_and_a_dispatch_may_be_two_calls(plain: Model, tmp_path: Path) -> None:
    save_file(copy.deepcopy(plain).half().state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = Model()
    load_weights.load_checkpoint_in_model(
        model, tmp_path / "model.safetensors", dict(SPREAD), offload_folder=tmp_path / "f", dtype="float32",
        keep_in_fp32_modules=["norm"],
    )  # fmt: skip
    dispatch_model(model, dict(SPREAD), offload_dir=tmp_path / "f")
    torch.testing.assert_close(model.eval()(X), plain(X), atol=1e-2, rtol=1e-2)


def test_what_a_checkpoint_lacks_is_an_error_for_a_model_without_memory(plain: Model, tmp_path: Path) -> None:
    """Accelerate leaves such weights on the meta device, which is found when they are used."""
    save_file({"a.weight": plain.a.weight.detach()}, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = Model()
    with pytest.raises(WeightsMismatchError, match=r"a\.bias"):
        load_weights.load_checkpoint_in_model(model, tmp_path)
    load_weights.load_checkpoint_in_model(plain, tmp_path)
    with pytest.raises(ValueError, match="one of 'auto'"):
        load_weights.load_checkpoint_and_dispatch(plain, tmp_path, "other")
    with pytest.raises(ValueError, match="full_state_dict=False"):
        load_weights.load_checkpoint_in_model(plain, tmp_path, full_state_dict=False)


@pytest.mark.parametrize("name", ["w.safetensors", "w.bin"])
def test_a_weight_file_is_read(plain: Model, name: str, tmp_path: Path) -> None:
    values = plain.state_dict()
    save_file(values, tmp_path / name) if name.endswith("s") else torch.save(values, tmp_path / name)
    found = load_weights.load_state_dict(tmp_path / name, {"a": "cpu", "": "disk"})
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())
