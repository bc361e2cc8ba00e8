"""Rows of the table "Where it differs" about checkpoints."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_resumed_loops import trained_after_resume
from accelerate_sides import OURS, SIDES, THEIRS, Side, said
from drivetrain_accelerate import write_accelerate_layout

pytest.importorskip("accelerate")


class FailsTheSecondTime:
    """An object of a program that cannot be saved twice, as on a disk that is full."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        self.number += 1
        if self.number == 2:
            raise OSError("no space left")
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def project_in(side: Side, folder: Path, total_limit: int) -> Any:
    """Return the options of automatic names with a limit."""
    kind = side("accelerate.utils.ProjectConfiguration")
    return kind(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=total_limit)


@contextmanager
def run_of(side: Side, **options: Any) -> Generator[tuple[Any, nn.Module, Any]]:
    """Prepare a model whose weight is 0, and a loader of the batches 0 to 5."""
    with side.accelerator(**options) as accelerator:
        given = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(given.weight)
        numbers: Any = range(6)
        yield accelerator, *accelerator.prepare(given, DataLoader(numbers))


def numbers_of(loader: Any) -> list[int]:
    return [batch.item() for batch in loader]


def read_after_resume(side: Side, folder: Path) -> list[list[int]]:
    """Return what is read after a resume from the second batch: without a skip, and with one of as many."""
    with run_of(side) as (accelerator, _, loader):
        for number, _ in enumerate(loader, start=1):
            if number == 2:
                accelerator.save_state(str(folder))
                break
    found: list[list[int]] = []
    for skipped in (0, 2):
        with run_of(side) as (accelerator, _, loader):
            accelerator.load_state(str(folder))
            found.append(numbers_of(accelerator.skip_first_batches(loader, skipped) if skipped else loader))
    return found


def test_skipped_batches(tmp_path: Path) -> None:
    """`load_state`, then `skip_first_batches`"""
    theirs, ours, restored = (read_after_resume(side, tmp_path / side.name) for side in SIDES)
    assert theirs == restored == [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5]]
    assert ours == [[2, 3, 4, 5]] * 2


def test_passed_over_batches(tmp_path: Path) -> None:
    """`load_state`, then a loop that passes over as many batches as were read"""
    theirs, ours, restored = (
        said(lambda side=side: trained_after_resume(side, tmp_path / side.name, num_batches=8, skip=3))
        for side in SIDES
    )
    assert theirs == restored == [3, 4, 5, 6, 7]
    assert "3 batches were passed over before the first backward after load_state" in ours
    assert "have loaders begin their epoch anew" in ours


def read_after(side: Side) -> Any:
    """Return the first sample after an optimizer's state of other batches was loaded, and as many were skipped."""
    numbers: Any = range(24)
    state: Any = {}
    with side.accelerator() as accelerator:
        given = nn.Linear(1, 1)
        _, optimizer, loader = accelerator.prepare(
            given, torch.optim.SGD(given.parameters()), DataLoader(numbers, batch_size=4)
        )
        for place, _ in enumerate(loader):
            state = optimizer.state_dict()
            if place == 2:
                break
        smaller = accelerator.prepare(DataLoader(numbers, batch_size=2))
        optimizer.load_state_dict(state)
        return said(lambda: next(iter(accelerator.skip_first_batches(smaller, 3))).tolist())


def test_counted() -> None:
    """`skip_first_batches` by a program's own count, after an optimizer's state from batches of another size"""
    theirs, ours, restored = map(read_after, SIDES)
    assert theirs == restored == [6, 7]
    assert "12 of the epoch had been read" in ours


def test_counted_micro_batches(tmp_path: Path) -> None:
    """`accelerator.step` after `load_state`"""
    found: list[int] = []
    for side in SIDES:
        with run_of(side, gradient_accumulation_steps=2) as (accelerator, model, loader):
            for _ in zip(range(2), loader, strict=False):
                with accelerator.accumulate(model):
                    pass
            accelerator.save_state(str(tmp_path / side.name))
        with run_of(side, gradient_accumulation_steps=2) as (accelerator, _, _):
            accelerator.load_state(str(tmp_path / side.name))
            found.append(accelerator.step)
    assert found == [2, 0, 0]


@pytest.mark.slow
def test_an_open_window(tmp_path: Path) -> None:
    """`save_state` in an open window of accumulation"""
    found: list[list[int]] = []
    for side in SIDES:
        for read in (2, 5):
            folder = str(tmp_path / f"{side.name}{read}")
            with window_of(side) as (accelerator, model, optimizer, loader):
                for _ in zip(range(read), loader, strict=False):
                    with accelerator.accumulate(model):
                        accelerator.backward(model(torch.ones(1)).mean())
                        optimizer.step()
                accelerator.save_state(folder)
                assert any(Path(folder).iterdir())
            with window_of(side) as (accelerator, _, _, loader):
                accelerator.load_state(folder)
                rest = accelerator.skip_first_batches(loader, read)
                found.append([sample for batch in rest for sample in batch.tolist()])
    assert found[:2] == [[2, 3, 4, 5, 6, 7], [5, 6, 7]]
    assert found[2:4] == [[0, 1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7]]
    assert found[4:] == found[:2]


@contextmanager
def window_of(side: Side) -> Generator[tuple[Any, ...]]:
    """Prepare a model, its optimizer, and a loader of the batches 0 to 7, in windows of three."""
    with side.accelerator(gradient_accumulation_steps=3) as accelerator:
        given = nn.Linear(1, 1)
        numbers: Any = range(8)
        optimizer = torch.optim.SGD(given.parameters())
        yield accelerator, *accelerator.prepare(given, optimizer, DataLoader(numbers))


def test_a_failing_save(tmp_path: Path) -> None:
    """`save_state`"""
    for side in SIDES:
        with run_of(side) as (accelerator, model, _):
            accelerator.register_for_checkpointing(FailsTheSecondTime())
            accelerator.save_state(str(tmp_path / side.name))
            nn.init.ones_(model.weight)  # pyright: ignore[reportArgumentType]
            with pytest.raises(OSError, match="no space left"):
                accelerator.save_state(str(tmp_path / side.name))
            accelerator.load_state(str(tmp_path / side.name))
            assert model.weight.item() == (1.0 if side is THEIRS else 0.0)


def test_total_limit(tmp_path: Path) -> None:
    """`total_limit`"""
    for side in SIDES:
        folder = tmp_path / side.name
        with run_of(side, project_config=project_in(side, folder, 1)) as (accelerator, _, _):
            accelerator.register_for_checkpointing(FailsTheSecondTime())
            accelerator.save_state()
            with pytest.raises(OSError, match="no space left"):
                accelerator.save_state()
            assert (folder / "checkpoints" / "checkpoint_0").exists() == (side is not THEIRS)


def numbered(side: Side, folder: Path, *, loads: bool) -> Any:
    """Save three times with the weights 1 to 3, then in a second run with 4; return what a load takes then."""
    taken: list[Any] = []
    for weights, loads_first in (((1, 2, 3), False), ((4,), loads), ((), True)):
        with run_of(side, project_config=project_in(side, folder, 2)) as (accelerator, model, _):
            if loads_first:
                accelerator.load_state()
                taken.append(model.weight.item())  # pyright: ignore[reportCallIssue]
            for weight in weights:
                nn.init.constant_(model.weight, weight)  # pyright: ignore[reportArgumentType]
                taken.append(Path(accelerator.save_state()).name)
    return taken


@pytest.mark.slow
def test_numbers_after_a_load(tmp_path: Path) -> None:
    """automatic checkpoints of a second run in one folder, after `load_state`"""
    first = ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    theirs, *others = (numbered(side, tmp_path / side.name, loads=True) for side in SIDES)
    assert theirs == [*first, 3.0, "checkpoint_0", 3.0]
    assert others == [[*first, 3.0, "checkpoint_3", 4.0]] * 2


@pytest.mark.slow
def test_numbers_without_a_load(tmp_path: Path) -> None:
    """automatic checkpoints of a second run without `load_state`"""
    theirs, *others = (said(partial(numbered, side, tmp_path / side.name, loads=False)) for side in SIDES)
    assert theirs == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_0", 3.0]
    assert all("holds checkpoint_2 of an earlier run: call load_state()" in each for each in others)


def test_no_checkpoint_is_kept(tmp_path: Path) -> None:
    """`total_limit` below 1"""

    def kept(side: Side, limit: int) -> Any:
        folder = tmp_path / f"{side.name}{limit}"
        with run_of(side, project_config=project_in(side, folder, limit)) as (accelerator, _, _):
            accelerator.save_state()
            accelerator.save_state()
        return [path.name for path in (folder / "checkpoints").iterdir()]

    for limit in (0, -1):
        theirs, *others = (said(partial(kept, side, limit)) for side in SIDES)
        assert theirs == ["checkpoint_1"]
        assert all("say 1 or more, or None to keep all" in each for each in others)


def test_a_model_taken_out(tmp_path: Path) -> None:
    """a hook that takes a model out of `weights`"""

    def take_out(models: Any, weights: list[Any], output_dir: str) -> None:
        weights.clear()

    for side in SIDES:
        folder = tmp_path / side.name
        with run_of(side) as (accelerator, model, _):
            accelerator.register_save_state_pre_hook(take_out)
            accelerator.save_state(str(folder))
            if side is THEIRS:
                assert not list(folder.rglob("*model*"))
                continue
            nn.init.ones_(model.weight)  # pyright: ignore[reportArgumentType]
            accelerator.load_state(str(folder))
            assert torch.equal(model.weight, torch.zeros(1, 1))  # pyright: ignore[reportArgumentType]
            nn.init.ones_(model.weight)  # pyright: ignore[reportArgumentType]
            accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
            accelerator.load_state(str(folder))
            assert torch.equal(model.weight, torch.ones(1, 1))  # pyright: ignore[reportArgumentType]


class Placed:
    """An object of a program whose state holds what is no plain value."""

    def __init__(self) -> None:
        self.folder = Path("data")

    def state_dict(self) -> dict[str, Path]:
        return {"folder": self.folder}

    def load_state_dict(self, state: dict[str, Path]) -> None:
        self.folder = state["folder"]


def test_states_that_are_no_plain_values(tmp_path: Path) -> None:
    """a registered object whose state holds more than tensors and plain values, such as a `pathlib.Path`"""
    found: list[Any] = []
    for side in SIDES:
        with run_of(side) as (accelerator, _, _):
            accelerator.register_for_checkpointing(Placed())
            found.append(said(partial(accelerator.save_state, str(tmp_path / side.name))))
            if side is THEIRS:
                accelerator.load_state(str(tmp_path / side.name))
    theirs, ours, restored = found
    assert theirs == tmp_path / "theirs"
    assert ours == restored
    assert "['folder']: it is a pathlib.PosixPath" in ours
    assert "return tensors and plain values" in ours


def test_names_of_folders(tmp_path: Path) -> None:
    """the folders of automatic checkpoints, and which of them `total_limit` keeps"""
    for side in SIDES:
        folder = tmp_path / side.name
        with run_of(side, project_config=project_in(side, folder, 2)) as (accelerator, _, _):
            saved = [Path(accelerator.save_state()).relative_to(folder).as_posix() for _ in range(3)]
        assert saved == ["checkpoints/checkpoint_0", "checkpoints/checkpoint_1", "checkpoints/checkpoint_2"]
        left = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert left == ["checkpoint_1", "checkpoint_2"]


def test_names_of_files(tmp_path: Path) -> None:
    """the files of `save_state` that other programs look for"""
    for side in SIDES:
        with run_of(side) as (accelerator, _, _):
            accelerator.save_state(str(tmp_path / side.name))
            if side is OURS:
                write_accelerate_layout(accelerator, tmp_path / "written")
    theirs, ours, restored, written = (
        sorted(path.name for path in (tmp_path / name).iterdir())
        for name in ("theirs", "ours", "restored", "written")
    )
    assert theirs == written == ["model.safetensors", "random_states_0.pkl"]
    assert ours == restored == ["step-0", "writer.json"]


def test_a_part_of_the_weights(tmp_path: Path) -> None:
    """`load_state(strict=False)`"""
    found: list[Any] = []
    for side in SIDES:
        with run_of(side) as (accelerator, _, _):
            accelerator.save_state(str(tmp_path / side.name))
            load = partial(accelerator.load_state, str(tmp_path / side.name), strict=False)
            found.append(said(load))
    theirs, ours, restored = found
    assert theirs is None
    assert ours == restored
    assert "load_state(strict=False): a checkpoint is loaded whole" in ours
