"""Models of an Accelerator exported and loaded, under every way of holding them."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from drivetrain import Accelerator
from drivetrain_backends import full_state_dict
from drivetrain_checkpoint import (
    CorruptCheckpointError,
    OtherRankFailedError,
    StateError,
    load_model,
    open_export,
    save_model,
)


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


def accelerated(backend: str, **settings: object) -> Accelerator:
    name, _, stage = backend.partition("-")
    sections = {"run": {"show_plan": False}} | ({"deepspeed": {"stage": int(stage)}} if stage else {})
    return Accelerator(backend=name, cpu=True, sections=sections, **settings)  # type: ignore[arg-type]


def train(accelerator: Accelerator, model: nn.Module, optimizer: AdamW) -> None:
    accelerator.backward(model(torch.arange(12.0).reshape(4, 3)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def there_and_back(folder: str, backend: str) -> list[dict[str, list[float]]]:
    """Train, export, train on, load; the weights and the optimizer's state at each point."""
    found: list[dict[str, list[float]]] = []
    with accelerated(backend) as accelerator:
        model = Tied()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=0.1))

        def look() -> None:
            state = accelerator.get_state_dict(model, everywhere=True)
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


def partly(folder: str, backend: str) -> tuple[object, dict[str, list[float]]]:
    with accelerated(backend) as accelerator:
        model = Tied()
        model, _ = accelerator.prepare(model, AdamW(model.parameters()))
        with pytest.raises((ValueError, OtherRankFailedError), match=r"missing outer.bias, unexpected x"):
            accelerator.load_model(model, folder)
        untouched = accelerator.get_state_dict(model, everywhere=True)
        assert torch.equal(untouched["inner.bias"], Tied().inner.bias)
        names = accelerator.load_model(model, folder, strict=False)
        state = accelerator.get_state_dict(model, everywhere=True)
        return names, {name: value.flatten().tolist() for name, value in state.items()}


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "deepspeed-3"])
@pytest.mark.default_cases("ddp")
def test_other_names_are_refused_on_all_ranks_or_told_and_the_rest_is_loaded(
    run_ranks, tmp_path: Path, backend: str
) -> None:
    tensors = Tied(seed=1).state_dict()
    tensors["x"] = torch.ones(1)
    kept = Tied().outer.bias.tolist()
    del tensors["outer.bias"], tensors["outer.weight"]
    save_model(tensors, tmp_path)
    for names, found in run_ranks(partly, str(tmp_path), backend, timeout_seconds=150):
        assert names == (["outer.bias"], ["x"])
        assert found.pop("outer.bias") == kept
        assert found.pop("outer.weight") == found["inner.weight"]
        for name, value in found.items():
            assert value == tensors[name].flatten().tolist(), name


class Extra(nn.Linear):
    """A layer that keeps something beside tensors."""

    def get_extra_state(self) -> object:
        return {"calls": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def failing(folder: str, backend: str) -> list[str]:
    """What each rank is told of exports that the disk does not take, at once or midway, and of one that is torn."""
    said: list[str] = []
    with accelerated(backend) as accelerator:
        model, extra = Tied(), Extra(1, 1)
        model, _ = accelerator.prepare(model, AdamW(model.parameters()))
        occupied = Path(folder) / "file"
        for path, kind in ((occupied, NotADirectoryError), (Path(folder) / "torn", CorruptCheckpointError)):
            act = accelerator.save_model if path == occupied else accelerator.load_model
            with pytest.raises((kind, OtherRankFailedError)) as caught:
                act(model, path)
            said.append(str(caught.value))
        with pytest.raises((IsADirectoryError, OtherRankFailedError)) as caught:
            accelerator.save_model(model, Path(folder) / "blocked", max_shard_size=40)
        said.append(str(caught.value))
        with pytest.raises(ValueError, match="max_shard_size=0"):
            accelerator.save_model(model, folder, max_shard_size=0)
        accelerator.save_model(model, Path(folder) / "whole")
    with accelerated("ddp") as accelerator:
        extra = accelerator.prepare(extra)
        with pytest.raises(StateError, match="'_extra_state' is of type dict; an export holds tensors only"):
            accelerator.save_model(extra, Path(folder) / "extra")
    return said


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "deepspeed-3"])
@pytest.mark.default_cases("ddp")
def test_a_failure_of_the_main_process_is_told_on_all_ranks_and_the_next_export_succeeds(
    run_ranks, tmp_path: Path, backend: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    blocked = tmp_path / "blocked" / "model-00002-of-00004.safetensors.tmp"
    blocked.mkdir(parents=True)
    for said in run_ranks(failing, str(tmp_path), backend, timeout_seconds=150):
        assert "file is a file: name the folder" in said[0]
        assert "model.safetensors is no whole safetensors file" in said[1]
        assert "model-00002-of-00004.safetensors.tmp" in said[2]
    assert list(blocked.parent.iterdir()) == [blocked]
    load_model(Tied(seed=1), tmp_path / "whole")
    assert not (tmp_path / "extra").exists()


def frozen_and_built_empty(folder: str, backend: str) -> dict[str, list[float]]:
    """Export a model trained in bf16, with a frozen bias, and load it into one that is built without memory."""
    with accelerated(backend, mixed_precision="bf16") as accelerator:
        model = Tied()
        model.norm = nn.LayerNorm(3)
        model.outer.bias.requires_grad_(False)
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=0.1))
        train(accelerator, model, optimizer)
        expected = accelerator.get_state_dict(model, everywhere=True)
        accelerator.save_model(model, folder)
    with accelerated(backend, mixed_precision="bf16") as accelerator:
        with accelerator.building():
            model = Tied(seed=1)
            model.norm = nn.LayerNorm(3)
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=0.1))
        accelerator.load_model(model, folder)
        found = accelerator.get_state_dict(model, everywhere=True)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        train(accelerator, model, optimizer)
    return {name: value.flatten().tolist() for name, value in expected.items()}


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed-1", "deepspeed-3"])
@pytest.mark.default_cases("fsdp")
def test_masters_are_exported_and_loaded(run_ranks, tmp_path: Path, backend: str) -> None:
    expected, _ = run_ranks(frozen_and_built_empty, str(tmp_path), backend, timeout_seconds=150)
    exported = open_export(tmp_path)
    assert exported.places["inner.weight"].info.dtype == torch.float32
    assert {name: value.flatten().tolist() for name, value in exported.items()} == expected


def compiled_export(folder: str) -> dict[str, object]:
    with accelerated("ddp", mixed_precision="bf16") as accelerator:
        model = torch.compile(Tied(), backend="eager")
        model = accelerator.prepare(model)
        accelerator.save_model(model, folder, metadata={"run": "7"})
    return {}


def test_a_compiled_model_has_plain_names(run_ranks, tmp_path: Path) -> None:
    run_ranks(compiled_export, str(tmp_path), num_processes=1)
    content = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header.pop("__metadata__") == {
        "format": "pt",
        "run": "7",
        "tied_weights": '{"outer.weight": "inner.weight"}',
    }
    assert header.keys() == Tied().state_dict().keys() - {"outer.weight"}
    assert {described["dtype"] for described in header.values()} == {"F32", "I64"}
