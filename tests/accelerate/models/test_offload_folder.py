"""Folders of offloaded weights, which either interface reads as the other has written them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drivetrain_accelerate.models import offload_folder as ours
from drivetrain_weights import WeightFilesError

theirs = pytest.importorskip("accelerate.utils.offload")

WEIGHTS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "a.half": torch.ones(3, dtype=torch.bfloat16) / 3,
    "b.scalar": torch.tensor(3.5),
    "b.flags": torch.tensor([True, False]),
    "b.ids": torch.arange(4),
    "b.small": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "view": torch.arange(6.0).view(2, 3).T,
}


@pytest.mark.parametrize(("writer", "reader"), [(ours, theirs), (theirs, ours), (ours, ours)])
def test_what_one_writes_the_other_reads(writer: Any, reader: Any, tmp_path: Path) -> None:
    writer.offload_state_dict(tmp_path, WEIGHTS)
    loader = reader.OffloadedWeightsLoader(save_folder=tmp_path)
    assert (list(loader), len(loader)) == (list(WEIGHTS), len(WEIGHTS))
    for name, weight in WEIGHTS.items():
        assert loader[name].dtype == weight.dtype
        assert torch.equal(loader[name].float(), weight.float())
    entry = json.loads((tmp_path / "index.json").read_text())["a.half"]
    assert torch.equal(reader.load_offloaded_weight(str(tmp_path / "a.half.dat"), entry), WEIGHTS["a.half"])


def test_the_indices_are_the_same_and_grow(tmp_path: Path) -> None:
    found: list[Any] = []
    for name, room in (("ours", ours), ("theirs", theirs)):
        folder = tmp_path / name
        room.offload_state_dict(folder, WEIGHTS)
        room.save_offload_index(room.offload_weight(torch.ones(2), "more", folder, {}), folder)
        room.save_offload_index({}, folder)
        assert room.offload_weight(torch.ones(2), "no index", folder) is None
        found.append((json.loads((folder / "index.json").read_text()), sorted(os.listdir(folder))))
    assert found[0] == found[1]


@pytest.mark.parametrize("room", [ours, theirs])
def test_weights_in_memory_come_first_and_safetensors_files_are_read(room: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"stored": torch.ones(2)}, path)
    index = {"named": {"safetensors_file": str(path), "weight_name": "stored", "dtype": "float16"}}
    loader = room.OffloadedWeightsLoader({"here": torch.zeros(1)}, index=index)
    assert (list(loader), loader["named"].dtype) == (["here", "named"], torch.float16)
    with pytest.raises(KeyError, match="gone"):
        loader["gone"]
    prefixed = room.PrefixedDataset(loader, "na")
    assert torch.equal(prefixed["med"], loader["named"])
    assert list(prefixed) == ["named"]
    with pytest.raises(ValueError, match=r"state_dict.*save_folder.*index"):
        room.OffloadedWeightsLoader()


def test_a_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    ours.offload_weight(torch.ones(4), "a", tmp_path)
    (tmp_path / "a.dat").write_bytes(b"1234")
    with pytest.raises(WeightFilesError, match="shorter than the 16 bytes"):
        ours.load_offloaded_weight(tmp_path / "a.dat", {"dtype": "float32", "shape": [4]})
    with pytest.raises(WeightFilesError, match="dtype 'float3', which this torch does not have"):
        ours.find_dtype("float3")


def test_the_part_of_some_modules() -> None:
    names = {name: torch.ones(1) for name in ("a.b", "ab.c", "a", "c.d")}
    mine, real = (room.extract_submodules_state_dict(names, ["a", "c"]) for room in (ours, theirs))
    assert mine.keys() == real.keys()
