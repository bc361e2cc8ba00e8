"""Models of an Accelerator exported and loaded, under every way of holding them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from drivetrain_backends import full_state_dict
from drivetrain_checkpoint import (
    CorruptCheckpointError,
    OtherRankFailedError,
    StateError,
    load_model,
    open_export,
    save_model,
)
from plain_loop.accelerated import accelerator_of, assert_equal_weights, take_steps, weights_of


class Tied(nn.Module):
    """A model with a tied weight, buffers, and layers that two ranks do not divide evenly."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.outer(torch.tanh(self.inner(x))))


def train(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    take_steps(accelerator, model, optimizer, lambda _: model(x).square().sum(), [0])


def there_and_back(folder: str, backend: str) -> list[dict[str, list[float]]]:
    """Train, export, train on, load; the weights and the optimizer's state at each point."""
    found: list[dict[str, list[float]]] = []
    with accelerator_of(backend) as accelerator:
        model = Tied()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=0.1))

        def look() -> None:
            state = weights_of(accelerator, model)
            kept = full_state_dict(accelerator._parts.prepared.of(model).state_dict()["optimizers"])[0][
                "state"
            ]
            moments = {
                f"{name}.{key}": value
                for name, of_one in kept.items()
                for key, value in of_one.items()
                if key != "step"
            }
            found.append({name: value.flatten().tolist() for name, value in (state | moments).items()})

        train(accelerator, model, optimizer)
        look()
        on_main = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            assert on_main["outer.weight"] is on_main["inner.weight"]
            assert_equal_weights(on_main, weights_of(accelerator, model))
            assert all(
                type(value) is torch.Tensor and value.device.type == "cpu" for value in on_main.values()
            )
        else:
            assert on_main == {}
            weights_of(accelerator, model)
        plan = accelerator.save_model(model, folder, max_shard_size=40)
        assert plan.is_sharded
        assert plan.ties == {"outer.weight": "inner.weight"}
        train(accelerator, model, optimizer)
        look()
        assert accelerator.load_model(model, folder) == ([], [])
        look()
        train(accelerator, model, optimizer)
        look()
    return found


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed-0", "deepspeed-2", "deepspeed-3"])
@pytest.mark.default_cases("fsdp")
def test_an_export_holds_the_trained_weights_and_brings_them_back_beside_the_optimizers_state(
    run_ranks, tmp_path: Path, backend: str
) -> None:
    expected, _ = run_ranks(there_and_back, str(tmp_path / "ddp"), "ddp")
    tmp_path = tmp_path / backend
    first, other = run_ranks(there_and_back, str(tmp_path), backend, timeout_seconds=150)
    assert first == other
    saved, later, loaded, trained_on = first
    for name, value in expected[-1].items():
        assert trained_on[name] == pytest.approx(value, abs=2e-6), name
    weights = Tied().state_dict().keys()
    assert {name: loaded[name] for name in weights} == {name: saved[name] for name in weights}
    assert {name: value for name, value in loaded.items() if name not in weights} == {
        name: value for name, value in later.items() if name not in weights
    }
    assert saved["inner.weight"] != later["inner.weight"]
    plain = Tied(seed=1)
    assert load_model(plain, tmp_path) == ([], [])
    assert {name: value.flatten().tolist() for name, value in plain.state_dict().items()} == {
        name: saved[name] for name in weights
    }


ON_ALL_RANKS = pytest.mark.ranks(2, timeout_seconds=150)


@ON_ALL_RANKS
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "deepspeed-3"])
@pytest.mark.default_cases("ddp")
def test_other_names_are_refused_on_all_ranks_or_told_and_the_rest_is_loaded(
    tmp_path: Path, backend: str
) -> None:
    tensors = Tied(seed=1).state_dict()
    tensors["x"] = torch.ones(1)
    del tensors["outer.bias"], tensors["outer.weight"]
    with accelerator_of(backend) as accelerator:
        if accelerator.is_main_process:
            save_model(tensors, tmp_path)
        accelerator.wait_for_everyone()
        model = Tied()
        model, _ = accelerator.prepare(model, AdamW(model.parameters()))
        with pytest.raises((ValueError, OtherRankFailedError), match=r"missing outer.bias, unexpected x"):
            accelerator.load_model(model, tmp_path)
        assert torch.equal(weights_of(accelerator, model)["inner.bias"], Tied().inner.bias)  # untouched
        assert accelerator.load_model(model, tmp_path, strict=False) == (["outer.bias"], ["x"])
        found = weights_of(accelerator, model)
    assert torch.equal(found.pop("outer.bias"), Tied().outer.bias)
    assert torch.equal(found.pop("outer.weight"), found["inner.weight"])
    assert_equal_weights(found, {name: value for name, value in tensors.items() if name != "x"})


class Extra(nn.Linear):
    """A layer that keeps something beside tensors."""

    def get_extra_state(self) -> object:
        return {"calls": 1}

    def set_extra_state(self, state: object) -> None:
        pass


@ON_ALL_RANKS
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "deepspeed-3"])
@pytest.mark.default_cases("ddp")
def test_a_failure_of_the_main_process_is_told_on_all_ranks_and_the_next_export_succeeds(
    tmp_path: Path, backend: str
) -> None:
    """Exports that the disk does not take, at once or midway, and one that is torn."""
    blocked = tmp_path / "blocked" / "model-00002-of-00004.safetensors.tmp"
    with accelerator_of(backend) as accelerator:
        if accelerator.is_main_process:
            (tmp_path / "file").write_text("")
            (tmp_path / "torn").mkdir()
            (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
            blocked.mkdir(parents=True)
        accelerator.wait_for_everyone()
        model, extra = Tied(), Extra(1, 1)
        model, _ = accelerator.prepare(model, AdamW(model.parameters()))
        with pytest.raises(
            (NotADirectoryError, OtherRankFailedError), match="file is a file: name the folder"
        ):
            accelerator.save_model(model, tmp_path / "file")
        torn = r"model\.safetensors is no whole safetensors file"
        with pytest.raises((CorruptCheckpointError, OtherRankFailedError), match=torn):
            accelerator.load_model(model, tmp_path / "torn")
        with pytest.raises((IsADirectoryError, OtherRankFailedError), match=blocked.name):
            accelerator.save_model(model, tmp_path / "blocked", max_shard_size=40)
        with pytest.raises(ValueError, match="max_shard_size=0"):
            accelerator.save_model(model, tmp_path, max_shard_size=0)
        accelerator.save_model(model, tmp_path / "whole")
        accelerator.wait_for_everyone()
    with accelerator_of("ddp") as accelerator:
        extra = accelerator.prepare(extra)
        with pytest.raises(StateError, match="'_extra_state' is of type dict; an export holds tensors only"):
            accelerator.save_model(extra, tmp_path / "extra")
    assert list(blocked.parent.iterdir()) == [blocked]
    load_model(Tied(seed=1), tmp_path / "whole")
    assert not (tmp_path / "extra").exists()


@ON_ALL_RANKS
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed-1", "deepspeed-3"])
@pytest.mark.default_cases("fsdp")
def test_masters_are_exported_and_loaded(tmp_path: Path, backend: str) -> None:
    """A model trained in bf16, with a frozen bias, and one that is built without memory."""
    with accelerator_of(backend, mixed_precision="bf16") as accelerator:
        model = Tied()
        model.norm = nn.LayerNorm(3)
        model.outer.bias.requires_grad_(False)
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=0.1))
        train(accelerator, model, optimizer)
        expected = weights_of(accelerator, model)
        accelerator.save_model(model, tmp_path)
        accelerator.wait_for_everyone()
    with accelerator_of(backend, mixed_precision="bf16") as accelerator:
        with accelerator.building():
            model = Tied(seed=1)
            model.norm = nn.LayerNorm(3)
        model.outer.bias.requires_grad_(False)  # DeepSpeed keeps no master of it
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=0.1))
        accelerator.load_model(model, tmp_path)
        assert_equal_weights(weights_of(accelerator, model), expected)
        train(accelerator, model, optimizer)
    exported = open_export(tmp_path)
    assert exported.places["inner.weight"].info.dtype == torch.float32
    assert_equal_weights(dict(exported.items()), expected)


@pytest.mark.ranks(1)
def test_a_compiled_model_has_plain_names(tmp_path: Path) -> None:
    with accelerator_of("ddp", mixed_precision="bf16") as accelerator:
        model = accelerator.prepare(torch.compile(Tied(), backend="eager"))
        accelerator.save_model(model, tmp_path, metadata={"run": "7"})
    content = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header.pop("__metadata__") == {
        "format": "pt",
        "run": "7",
        "tied_weights": '{"outer.weight": "inner.weight"}',
    }
    assert header.keys() == Tied().state_dict().keys() - {"outer.weight"}
    assert {described["dtype"] for described in header.values()} == {"F32", "I64"}
