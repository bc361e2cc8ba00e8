"""Checkpoints straight to where a map puts them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain_dispatch.errors import DeviceMapError, OffloadedError, WeightFilesError, WeightsMismatchError
from drivetrain_dispatch.load_and_dispatch import load_checkpoint_and_dispatch
from drivetrain_dispatch.model.meta_init import init_empty_weights
from drivetrain_dispatch.offload.dispatch import is_dispatched, offload_stats, remove_hooks

WIDTH = 16


class Language(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(self.norm(x.to(self.norm.weight.dtype)).to(x.dtype))


@pytest.fixture
def plain() -> Language:
    torch.manual_seed(0)
    return Language()


@pytest.fixture
def checkpoint(plain: Language, tmp_path: Path) -> Path:
    """Two shards with an index; the tied weight stands there once."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weights = {name: tensor for name, tensor in plain.state_dict().items() if name != "head.weight"}
    where: dict[str, str] = {}
    for number, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: weights[name] for name in names}, folder / file)
        where |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def empty() -> Language:
    with init_empty_weights():
        return Language()


TOKENS = torch.arange(12).reshape(2, 6)


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu"}, {"layers": "disk", "": "cpu"}, None])
def test_what_is_loaded_computes_the_same(
    plain: Language, checkpoint: Path, device_map: dict[str, str] | None
) -> None:
    files = {path: path.read_bytes() for path in checkpoint.iterdir()}
    model = load_checkpoint_and_dispatch(empty(), checkpoint, device_map)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    assert model.head.weight is model.embed.weight
    assert is_dispatched(model) == (device_map is not None)
    assert {
        path: path.read_bytes() for path in checkpoint.iterdir()
    } == files  # no second copy, nothing written


def test_a_budget_plans_the_map(plain: Language, checkpoint: Path) -> None:
    layer = WIDTH * (WIDTH + 1) * 4
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, "auto", {"cpu": 5 * layer, "disk": "1GB"}, no_split_module_classes=["Linear"]
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_weights_on_the_disk_are_converted_when_they_are_used(plain: Language, checkpoint: Path) -> None:
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, {"": "disk"}, dtype=torch.bfloat16, keep_in_fp32_modules="norm"
    )
    expected = plain.to(torch.bfloat16)
    expected.norm.float()
    torch.manual_seed(0)
    expected.norm.load_state_dict(Language().norm.state_dict())  # what bfloat16 has not rounded
    assert torch.equal(model(TOKENS), expected(TOKENS))
    assert model.layers[0].weight.dtype == torch.float32  # as the file has it
    assert offload_stats(model).num_used > 0
    remove_hooks(model)


def test_a_planned_map_of_the_host_brings_weights_ahead_too(tmp_path: Path) -> None:
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    load_checkpoint_and_dispatch(model, tmp_path, "auto", {"cpu": "20KB"}, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(1, 64, dtype=torch.bfloat16))
    assert offload_stats(model).num_used > 0
    assert offload_stats(model).num_missed == 0


def test_training_what_a_file_holds_in_fewer_bits_is_warned_of(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    values = {name: value.bfloat16() for name, value in plain.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"})
    with pytest.warns(
        UserWarning, match=r"stored in torch.bfloat16 and computed in torch.float32 is trained"
    ):
        model(torch.ones(2, 4)).sum().backward()
    del model.hf_device_map
    remove_hooks(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_checkpoint_that_changes_stops_the_next_forward(checkpoint: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk"})
    model(TOKENS)
    file = checkpoint / "model-1.safetensors"
    file.write_bytes(file.read_bytes())
    with pytest.raises(WeightFilesError, match="has changed since"):
        model(TOKENS)


def test_bad_input_is_said_and_leaves_the_model(checkpoint: Path, tmp_path: Path) -> None:
    model = empty()
    with pytest.raises(
        ValueError, match=r"device_map='fast': give a map from names to devices, .*, or one of 'auto'"
    ):
        load_checkpoint_and_dispatch(model, checkpoint, "fast")
    with pytest.raises(ValueError, match="keep_in_fp32_modules='nrom': the model has no module called so"):
        load_checkpoint_and_dispatch(model, checkpoint, "auto", keep_in_fp32_modules=["nrom"])
    with pytest.raises(DeviceMapError, match="give them more"):
        load_checkpoint_and_dispatch(model, checkpoint, "auto", {"cpu": 10, "disk": 10})
    with pytest.raises(WeightFilesError, match="holds no"):
        load_checkpoint_and_dispatch(model, tmp_path, "auto")
    with pytest.raises(ValueError, match=r"preload_module_classes=\['Nope'\]"):
        load_checkpoint_and_dispatch(model, checkpoint, {"": "disk"}, preload_module_classes="Nope")
    with init_empty_weights():
        larger = Language(5)
    with pytest.raises(WeightsMismatchError, match=r"layers\.4\.weight"):
        load_checkpoint_and_dispatch(larger, checkpoint, {"": "disk"})
    assert all(parameter.is_meta for one in (model, larger) for parameter in one.parameters())
    assert not is_dispatched(model)
    load_checkpoint_and_dispatch(model, checkpoint, {"": "disk"})
    with pytest.raises(OffloadedError, match="dispatched already"):
        load_checkpoint_and_dispatch(model, checkpoint, {"": "disk"})


def test_names_are_changed_on_the_way(plain: Language, tmp_path: Path) -> None:
    weights = {f"model.{name}": value.clone() for name, value in plain.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    model = load_checkpoint_and_dispatch(
        empty(), tmp_path, {"": "disk"}, rename=lambda name: name.removeprefix("model.")
    )
    assert torch.equal(model(TOKENS), plain(TOKENS))


@pytest.mark.parametrize(
    ("device_map", "max_memory", "message"),
    [
        ({"": "cpu"}, {"cpu": "1GB"}, r"max_memory=.* is for a map that is planned: leave it out"),
        (
            None,
            {"cpu": "1GB"},
            "is for a map that is planned: leave it out, or give device_map one of 'auto'",
        ),
        ("auto", {"cuda:99": "1GB", "cpu": "1GB"}, "max_memory: cuda:99 is not here"),
        ("sequential", {"0": "1GB"}, "'0' is no device: give the number 0"),
        ("auto", "1GB", "max_memory='1GB': give a size for each device"),
    ],
)
def test_budgets_that_would_be_ignored_or_cannot_be_are_said(
    device_map: dict[str, str] | str | None, max_memory: object, message: str, checkpoint: Path
) -> None:
    model = empty()
    with pytest.raises(ValueError, match=message):
        load_checkpoint_and_dispatch(model, checkpoint, device_map, max_memory)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, None])
def test_running_statistics_are_converted_as_the_model_converts_them(tmp_path: Path, device_map) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()

    torch.manual_seed(0)
    model = made()
    model[1].running_mean.normal_()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = made()
    load_checkpoint_and_dispatch(empty, tmp_path, device_map, dtype=torch.bfloat16)
    x = torch.randn(1, 3, 8, 8).bfloat16()
    model.to(torch.bfloat16)
    assert torch.equal(empty(x), model(x))
    for module in (empty.train(), model.train()):
        module(x)
    assert torch.equal(empty[1].running_mean, model[1].running_mean)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("device_map", {}),
        ("no_split_module_classes", ["Linear"]),
        ("keep_in_fp32_modules", ["norm"]),
        ("release_pages", True),
        ("offload_buffers", True),
        ("preload_module_classes", ["Linear"]),
        ("skip_keys", ["tokens"]),
    ],
)
def test_what_another_engine_does_not_read_is_refused_by_name(
    checkpoint: Path, argument: str, value: object
) -> None:
    given: dict[str, Any] = {argument: value}
    with pytest.raises(ValueError, match=f"engine='any' .* reads no {argument}: leave that out"):
        load_checkpoint_and_dispatch(empty(), checkpoint, engine="any", **given)
