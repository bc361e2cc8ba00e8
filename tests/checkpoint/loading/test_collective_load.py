import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from checkpoint.saves import flip, save
from drivetrain_checkpoint import Checkpointer, CorruptCheckpointError, NoCheckpointError
from drivetrain_checkpoint.storage.local import DiskReader
from drivetrain_state import Context, connect


def save_all(checkpointer: Checkpointer, step: int) -> Path:
    weight = torch.full((4,), float(step))
    return save(
        checkpointer,
        step,
        {"weight": weight, "tied": weight, "bias": torch.zeros(2)},
        replicated={"optimizer": {"state": {0: {"exp_avg": torch.ones(4)}}}, "betas": (0.9, 0.99)},
        per_rank={"seed": torch.tensor(step)},
        plan={"asked": step},
    )


@pytest.fixture
def checkpointer(tmp_path: Path, context: Context) -> Checkpointer:
    return Checkpointer(context, tmp_path)


def test_everything_comes_back(checkpointer: Checkpointer) -> None:
    path = save_all(checkpointer, 3)
    loaded = checkpointer.load()
    assert (loaded.path, loaded.step, loaded.saved_world_size, loaded.plan) == (path, 3, 1, {"asked": 3})
    model = loaded.models["model"]
    assert list(model) == ["weight", "tied", "bias"]
    assert model["weight"] is model["tied"]
    assert torch.equal(model["weight"], torch.full((4,), 3.0))
    assert loaded.replicated["betas"] == (0.9, 0.99)
    assert torch.equal(loaded.replicated["optimizer"]["state"][0]["exp_avg"], torch.ones(4))
    assert loaded.per_rank == {"seed": torch.tensor(3)}
    assert loaded.per_rank_missing is None


def test_extra_state_of_a_module_is_kept(checkpointer: Checkpointer) -> None:
    save(checkpointer, 1, {"_extra_state": {"amax": [1.5]}})
    assert checkpointer.load().models["model"] == {"_extra_state": {"amax": [1.5]}}


def test_the_newest_is_taken_and_uncompleted_ones_are_passed_over(checkpointer: Checkpointer) -> None:
    for step in (1, 2):
        save_all(checkpointer, step)
    (save_all(checkpointer, 3) / "manifest.json").unlink()
    assert checkpointer.load().step == 2
    assert checkpointer.latest() == checkpointer.directory / "step-2"


@pytest.mark.parametrize(
    "name", ["weights-model.r0.safetensors", "state.json", "rank-0.r0.safetensors", "manifest.json"]
)
def test_a_damaged_one_is_passed_over_with_a_warning(checkpointer: Checkpointer, name: str, caplog) -> None:
    save_all(checkpointer, 1)
    flip(save_all(checkpointer, 2) / name, -1 if name.endswith("safetensors") else 3)
    assert checkpointer.load().step == 1
    assert "step-2 is passed over" in caplog.text
    assert name in caplog.text


@pytest.mark.parametrize(
    "name", ["weights-model.r0.safetensors", "weights-model.json", "state.r0.safetensors", "rank-0.json"]
)
def test_a_damaged_one_that_was_named_is_an_error_that_names_the_file(
    checkpointer: Checkpointer, name: str
) -> None:
    save_all(checkpointer, 1)
    path = save_all(checkpointer, 2)
    for position in range(0, (path / name).stat().st_size, 11):
        flip(path / name, position)
        with pytest.raises(CorruptCheckpointError, match=rf"{path / name}"):
            checkpointer.load(path)
        flip(path / name, position)
    (path / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{name} is missing, though the manifest lists it"):
        checkpointer.load(path)


def test_with_none_that_is_good_it_says_why(checkpointer: Checkpointer) -> None:
    with pytest.raises(NoCheckpointError, match="it holds none"):
        checkpointer.load()
    (save_all(checkpointer, 1) / "state.json").unlink()
    with pytest.raises(NoCheckpointError, match=r"none of those in it is good: .*state\.json is missing"):
        checkpointer.load()
    assert checkpointer.latest() is None


def test_a_folder_that_is_not_there_is_named(checkpointer: Checkpointer) -> None:
    with pytest.raises(NoCheckpointError, match=r"step-9 is no folder.*name a checkpoint's"):
        checkpointer.load(checkpointer.directory / "step-9")


def two_ranks_save_and_load(directory: str) -> tuple[int, int]:
    with connect(device="cpu") as context:
        checkpointer = Checkpointer(context, directory)
        model = {"weight": torch.ones(3)} if context.topology.is_main else None
        save(checkpointer, 4, model, replicated={"lr": 0.1}, per_rank={"seed": context.topology.rank + 10})
        loaded = checkpointer.load()
        assert torch.equal(loaded.models["model"]["weight"], torch.ones(3))
        assert loaded.per_rank is not None
        return loaded.step, loaded.per_rank["seed"]


def two_ranks_load(directory: str) -> tuple[int, object, str | None]:
    with connect(device="cpu") as context:
        loaded = Checkpointer(context, directory).load()
        return loaded.step, loaded.per_rank, loaded.per_rank_missing


def two_ranks_load_where_the_file_of_rank_one_is_damaged(directory: str) -> tuple[int, str]:
    with connect(device="cpu") as context:
        checkpointer = Checkpointer(context, directory)
        save_all(checkpointer, 1)
        path = save_all(checkpointer, 2)
        if context.topology.is_main:
            flip(path / "rank-1.r1.safetensors", -1)
        with pytest.raises(CorruptCheckpointError, match=r"rank-1\.r1\.safetensors") as caught:
            checkpointer.load(path)
        return checkpointer.load().step, type(caught.value).__name__


def two_ranks_load_different_folders(directory: str) -> str:
    with connect(device="cpu") as context:
        checkpointer = Checkpointer(context, directory)
        paths = [save_all(checkpointer, 1), save_all(checkpointer, 2)]
        with pytest.raises(RuntimeError, match="see different checkpoints") as caught:
            checkpointer.load(paths[context.topology.rank])
        return type(caught.value).__name__


def test_each_rank_gets_its_own_state_back(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(two_ranks_save_and_load, str(tmp_path)) == [(4, 10), (4, 11)]


def test_with_another_world_size_per_rank_states_are_missing_with_a_reason(
    run_ranks, tmp_path: Path, context: Context
) -> None:
    run_ranks(two_ranks_save_and_load, str(tmp_path))
    loaded = Checkpointer(context, tmp_path).load()
    assert (loaded.step, loaded.saved_world_size, loaded.per_rank) == (4, 2, None)
    assert loaded.per_rank_missing is not None
    assert loaded.per_rank_missing.startswith("2 ranks saved and 1 load")


def test_one_rank_saves_and_two_load(run_ranks, tmp_path: Path, context: Context) -> None:
    save_all(Checkpointer(context, tmp_path), 6)
    why = "1 ranks saved and 2 load: per-rank states can only be loaded by as many ranks as saved them"
    assert run_ranks(two_ranks_load, str(tmp_path)) == [(6, None, why)] * 2


def test_damage_that_one_rank_meets_is_met_by_all(run_ranks, tmp_path: Path) -> None:
    answers = run_ranks(two_ranks_load_where_the_file_of_rank_one_is_damaged, str(tmp_path))
    assert answers == [(1, "CorruptCheckpointError")] * 2


def test_ranks_that_see_different_checkpoints_are_told(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(two_ranks_load_different_folders, str(tmp_path)) == ["FolderNotSharedError"] * 2


def test_a_disk_that_cannot_be_read_any_more_is_passed_over(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(checkpointer, 1)
    newest = save_all(checkpointer, 2)
    read_at = DiskReader.read_at

    def fail(reader: DiskReader, start: int, views: Sequence[memoryview]) -> int:
        if reader.path.parent == newest:
            raise OSError(errno.EIO, "Input/output error")
        return read_at(reader, start, views)

    monkeypatch.setattr(DiskReader, "read_at", fail)
    assert checkpointer.load().step == 1
    with pytest.raises(CorruptCheckpointError, match=r"step-2 cannot be read.*load another"):
        checkpointer.load(newest)
