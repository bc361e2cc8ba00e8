"""Files of sharded models, written and read here and by the installed Accelerate."""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator as DrivetrainAccelerator
from drivetrain_accelerate.accelerator.accelerator import Accelerator
from drivetrain_accelerate.checkpoint_files import sharded_files as ours
from drivetrain_accelerate.checkpoint_files.sharded_files import merge_fsdp_weights

real: Any = pytest.importorskip("accelerate.utils.fsdp_utils")
RealAccelerator: Any = pytest.importorskip("accelerate").Accelerator
FullyShardedDataParallelPlugin: Any = pytest.importorskip("accelerate.utils").FullyShardedDataParallelPlugin

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def prepared(accelerator: Any, *, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def step(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The same kernels in both packages; other tests keep theirs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@contextmanager
def run_of(kind: Any) -> Generator[Any]:
    accelerator = kind(cpu=True)
    state: Any = accelerator.state
    try:
        yield accelerator
    finally:
        accelerator.end_training()
        type(state)._reset_state(reset_partial_state=True)


def exchanged(folder: str, kind: str, direction: str) -> tuple[list[float], list[float]]:
    """Train, write, read in the other package, and train there; return the weights of both after the same steps."""
    sides: list[Any] = [
        (Accelerator, ours, SimpleNamespace(state_dict_type=kind)),
        (RealAccelerator, real, FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)),
    ]
    found: list[Any] = []
    for way, side in zip(
        ("save", "load"), sides if direction == "ours to real" else sides[::-1], strict=True
    ):
        kind_of, module, plugin = side
        with run_of(kind_of) as accelerator:
            model, optimizer = prepared(accelerator, seed=len(found))
            if way == "save":
                step(accelerator, model, optimizer)
            getattr(module, f"{way}_fsdp_model")(plugin, accelerator, model, folder, 1)
            getattr(module, f"{way}_fsdp_optimizer")(plugin, accelerator, optimizer, model, folder, 1)
            step(accelerator, model, optimizer)
            found.append(weights(model))
            accelerator.wait_for_everyone()
    return found[0], found[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of the real one
@pytest.mark.parametrize("direction", ["ours to real", "real to ours"])
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_files_are_exchanged_with_the_real_one(
    tmp_path: Path, deterministic: None, kind: str, direction: str
) -> None:
    mine, theirs = exchanged(str(tmp_path), kind, direction)
    assert mine == pytest.approx(theirs, rel=1e-6)
    end = ".bin" if kind == FULL else ""
    assert sorted(os.listdir(tmp_path)) == [f"optimizer_1{end}", f"pytorch_model_fsdp_1{end}"]


def errors_of_failing_writes(folder: Path) -> list[str]:
    """Let the main process fail in each function in which it writes or reads alone; return the kinds of errors."""
    plugin, found = SimpleNamespace(state_dict_type=FULL), list[str]()
    with run_of(Accelerator) as accelerator:
        model, optimizer = prepared(accelerator, seed=0)
        calls: list[Callable[[], Any]] = [
            lambda: merge_fsdp_weights(str(folder / "none"), str(folder / "merged")),
            lambda: accelerator.save_model(model, folder / "file", safe_serialization=False),
            lambda: ours.save_fsdp_model(plugin, accelerator, model, str(folder)),
            lambda: ours.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder)),
        ]
        for call in calls:
            with pytest.raises((OSError, RuntimeError), match=r"\w") as raised:
                call()
            found.append(type(raised.value).__name__)
    return found


@pytest.mark.slow
def test_what_fails_on_the_main_process_fails_on_the_others_too(tmp_path: Path, run_ranks: Any) -> None:
    (tmp_path / "file").touch()
    for name in ("pytorch_model_fsdp.bin", "optimizer.bin"):
        (tmp_path / name).mkdir()
    first, second = run_ranks(errors_of_failing_writes, tmp_path)
    assert "OtherRankFailedError" not in first
    assert second == ["OtherRankFailedError"] * 4


def on_shards(folder: str, kind: str) -> tuple[list[float], list[float]]:
    """Train sharded, write, and read into another sharded model; return the weights of both after the same steps."""
    inner = DrivetrainAccelerator(cpu=True, backend="fsdp")
    accelerator: Any = SimpleNamespace(
        inner=inner,
        is_main_process=inner.context.topology.is_main,
        wait_for_everyone=inner.wait_for_everyone,
    )
    plugin = SimpleNamespace(state_dict_type=kind)
    model, optimizer = prepared(inner, seed=0)
    step(inner, model, optimizer)
    ours.save_fsdp_model(plugin, accelerator, model, folder)
    ours.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    other, its = prepared(inner, seed=1)
    ours.load_fsdp_model(plugin, accelerator, other, folder)
    ours.load_fsdp_optimizer(plugin, accelerator, its, other, folder)
    at_save = inner.get_state_dict(other, everywhere=True)
    found: list[Any] = []
    for one, optimizer_of_it in ((model, optimizer), (other, its)):
        loss = one(torch.ones(2, 4)).square().sum()
        inner.backward(loss, model=one)
        optimizer_of_it.step()
        found.append(
            torch.cat([each.flatten() for each in inner.get_state_dict(one, everywhere=True).values()])
        )
    torch.save(at_save, Path(folder) / f"at_save_{inner.context.topology.rank}.pt")
    inner.end_training()
    return found[0].tolist(), found[1].tolist()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_sharded_models_are_written_and_read(tmp_path: Path, run_ranks: Any, kind: str) -> None:
    for mine, other in run_ranks(on_shards, str(tmp_path), kind):
        assert other == pytest.approx(mine, rel=1e-6)
    if kind == FULL:
        names = {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert torch.load(tmp_path / "pytorch_model_fsdp.bin").keys() == names
        return
    from safetensors.torch import load_file

    parts = tmp_path / "pytorch_model_fsdp_0"
    expected = torch.load(tmp_path / "at_save_0.pt")
    real.merge_fsdp_weights(str(parts), str(tmp_path / "theirs"))
    for safe, file in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        merge_fsdp_weights(str(parts), str(tmp_path / "ours"), safe)
        path = tmp_path / "ours" / file
        merged = load_file(path) if safe else torch.load(path)
        assert merged.keys() == expected.keys() == load_file(tmp_path / "theirs" / "model.safetensors").keys()
        assert all(torch.equal(merged[name], expected[name]) for name in expected)
    with pytest.raises(FileNotFoundError, match="say one of its folders: optimizer_0, pytorch_model_fsdp_0"):
        merge_fsdp_weights(str(tmp_path), str(tmp_path / "x"))
    merge_fsdp_weights(str(parts), str(tmp_path / "x"), remove_checkpoint_dir=True)
    assert not parts.exists()
