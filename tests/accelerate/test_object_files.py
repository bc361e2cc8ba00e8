"""Files of objects, beside the installed Accelerate."""

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accelerate_sides import OURS, THEIRS
from drivetrain_accelerate import object_files as ours
from drivetrain_accelerate.object_files import write_pickled_weights
from drivetrain_accelerate.states.partial_state import PartialState

real: Any = pytest.importorskip("accelerate.utils.other")


def test_what_torch_would_wait_for_or_map_wrongly_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    with pytest.raises(ValueError, match=r"pipe\.bin is no regular file but a named pipe"):
        ours.load(tmp_path / "pipe.bin")
    torch.save({"a": torch.arange(64)}, tmp_path / "plain.bin")
    with (
        zipfile.ZipFile(tmp_path / "plain.bin") as plain,
        zipfile.ZipFile(tmp_path / "small.bin", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    assert torch.equal(ours.load(tmp_path / "small.bin")["a"], torch.arange(64))
    with pytest.raises(ValueError, match=r"small\.bin is compressed"):
        ours.load(str(tmp_path / "small.bin"), mmap=True)


class Own:
    """A class that a file must not make run."""


@pytest.fixture(autouse=True)
def connected() -> Iterator[None]:
    from accelerate import PartialState as RealState

    RealState(cpu=True)
    PartialState(cpu=True)
    yield
    RealState._reset_state()
    PartialState._reset_state()


def test_files_of_one_are_read_by_the_other(tmp_path: Path) -> None:
    saved = {"a": torch.tensor([1.0]), "x": 1, "generator": np.random.get_state()}
    for writer, reader in ((real, ours), (ours, real)):
        writer.save(saved, tmp_path / "a.pt")
        loaded = reader.load(tmp_path / "a.pt")
        assert (loaded["a"], loaded["x"], loaded["generator"][0]) == (saved["a"], 1, "MT19937")
    assert ours.load(tmp_path / "a.pt", map_location="meta")["a"].device.type == "meta"


def test_classes_of_a_file_are_refused_unless_it_is_trusted(tmp_path: Path) -> None:
    torch.save({"own": Own()}, tmp_path / "own.pt")
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        ours.load(tmp_path / "own.pt")
    assert type(ours.load(tmp_path / "own.pt", weights_only=False)["own"]).__name__ == "Own"


def test_tensors_that_are_one_are_kept_once_and_parts_of_it_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = torch.arange(4.0)
    state = {"a": whole, "tied": whole, "part": whole[1:3], "t": torch.ones(2, 3).t()}
    assert sorted(real.clean_state_dict_for_safetensors({"a": whole, "tied": whole})) == ["a"]
    ours.save(state, tmp_path / "a.safetensors", safe_serialization=True)
    loaded = load_file(tmp_path / "a.safetensors")
    assert sorted(loaded) == ["a", "part", "t"]
    assert loaded["part"].tolist() == [1.0, 2.0]
    assert loaded["t"].shape == (3, 2)
    assert "['tied']: the same tensors" in caplog.text
    assert ours.clean_state_dict_for_safetensors({"a": 1}) == {"a": 1}


def _saved(folder: str) -> bool:
    state = PartialState(cpu=True)
    try:
        path = Path(folder) / f"rank{state.process_index}"
        ours.save(1, path)
        from drivetrain_accelerate.tensors.rank_collectives import wait_for_everyone

        wait_for_everyone()
        return path.exists()
    finally:
        PartialState._reset_state()


def test_the_main_process_alone_writes(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(_saved, str(tmp_path)) == [True, False]


def tied_model() -> nn.Module:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return model


def content_of(folder: Path) -> dict[str, Any]:
    """Return what each file holds, tensors as lists."""
    found: dict[str, Any] = {}
    for path in folder.iterdir():
        if path.suffix == ".json":
            found[path.name] = json.loads(path.read_text())
        else:
            weights = torch.load(path)
            found[path.name] = {name: value.tolist() for name, value in weights.items()}
    return found


@pytest.mark.parametrize("size", ["10GB", "0.3KB", 300, 1])
def test_files_and_index_are_those_of_the_real_one(tmp_path: Path, size: int | str) -> None:
    for side in (THEIRS, OURS):
        with side.accelerator() as accelerator:
            model = accelerator.prepare(tied_model())
            accelerator.save_model(model, tmp_path / side.name, max_shard_size=size, safe_serialization=False)
    theirs, ours = (content_of(tmp_path / side.name) for side in (THEIRS, OURS))
    assert theirs == ours
    assert len(theirs) == {"10GB": 1, "0.3KB": 3, 300: 3, 1: 6}[size]


def test_an_earlier_export_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    weights = tied_model().state_dict()
    (tmp_path / "notes.tmp").touch()
    write_pickled_weights(weights, tmp_path, max_shard_size=300)
    assert len(list(tmp_path.iterdir())) == 4
    write_pickled_weights(weights, tmp_path, max_shard_size="1GB")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.tmp", "pytorch_model.bin"}
    with pytest.raises(ValueError, match="max_shard_size='many'"):
        write_pickled_weights(weights, tmp_path, max_shard_size="many")
