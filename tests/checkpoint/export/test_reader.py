import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drivetrain_checkpoint import (
    CorruptCheckpointError,
    NoCheckpointError,
    TensorInfo,
    open_export,
    save_model,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> None:
    """Two files: a with its tie c, and b."""
    a = torch.arange(2.0)
    save_model({"a": a, "b": torch.ones(2, dtype=torch.bfloat16), "c": a}, folder, max_shard_size=8)


def test_names_shapes_and_ties_are_known_and_tensors_are_read_when_asked_for(tmp_path: Path) -> None:
    sharded(tmp_path)
    exported = open_export(tmp_path)
    assert sorted(exported) == ["a", "b", "c"]
    assert len(exported) == 3
    assert exported.places["c"] == exported.places["a"]
    assert exported.places["b"].info == TensorInfo(shape=(2,), dtype=torch.bfloat16)
    assert torch.equal(exported["c"], torch.arange(2.0))
    renamed = exported.renamed({"x": "c"})
    assert list(renamed) == ["x"]
    assert torch.equal(renamed["x"], torch.arange(2.0))


def test_the_one_file_is_taken_where_an_index_is_there_too(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"z": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert list(open_export(tmp_path)) == ["z"]


def test_tensors_that_no_index_lists_are_there_too(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"b": torch.zeros(2), "more": torch.zeros(1)}, tmp_path / SECOND)
    assert sorted(open_export(tmp_path)) == ["a", "b", "c", "more"]


@pytest.mark.parametrize("folder", ["", "missing"])
def test_a_folder_without_an_export_is_named(tmp_path: Path, folder: str) -> None:
    with pytest.raises(NoCheckpointError, match=r"holds no weights, none of \*\.safetensors"):
        open_export(tmp_path / folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / SECOND).unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{SECOND} is missing, though {INDEX} lists it"):
        open_export(tmp_path)


def test_a_tensor_that_its_file_does_not_hold_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / SECOND)
    with pytest.raises(CorruptCheckpointError, match=rf"{INDEX} names tensors .* not hold: 'b' \({SECOND}\)"):
        open_export(tmp_path)


@pytest.mark.parametrize("cut", [4, 40, -1])
@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_a_torn_file_is_named_before_a_tensor_is_read(tmp_path: Path, name: str, cut: int) -> None:
    sharded(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:cut])
    with pytest.raises(CorruptCheckpointError, match=f"{name} is no whole safetensors file"):
        open_export(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {}, "metadata": 3}',
    ],
)
def test_an_index_that_is_none_is_named(tmp_path: Path, index: bytes) -> None:
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(CorruptCheckpointError, match=rf"{INDEX} is no (index of weight files|JSON)"):
        open_export(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors"])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(
        CorruptCheckpointError, match=f"names the file '{file}': must be a file in the same folder"
    ):
        open_export(tmp_path)


@pytest.mark.parametrize("ties", ["{", "[]", '{"a": 1}'])
def test_damaged_ties_are_named(tmp_path: Path, ties: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", {"tied_weights": ties})
    with pytest.raises(
        CorruptCheckpointError, match=r"model\.safetensors: tied_weights in its header is (damaged|no JSON)"
    ):
        open_export(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).write_text('{"weight_map": {}, "metadata": {"tied_weights": 3}}')
    with pytest.raises(
        CorruptCheckpointError, match=rf"{INDEX}: tied_weights in its metadata is (damaged|no JSON)"
    ):
        open_export(tmp_path)


def test_a_tie_of_what_is_not_stored_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", {"tied_weights": '{"b": "x"}'})
    with pytest.raises(
        CorruptCheckpointError, match="'b' is said to be the same tensor as 'x', which no file"
    ):
        open_export(tmp_path)


def write_index(folder: Path, index: str, files: dict[str, str]) -> None:
    for tensor, file in files.items():
        save_file({tensor: torch.full((2,), float(len(tensor)))}, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize(
    "index",
    [
        "diffusion_pytorch_model.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "model.fp16.safetensors.index.json",
        "adapter.index.json",
    ],
)
def test_an_index_of_any_name_is_read(tmp_path: Path, index: str) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")  # of other files
    write_index(tmp_path, index, {"a": "x-00001-of-00002.safetensors", "bb": "weights.safetensors"})
    exported = open_export(tmp_path)
    assert {name: tensor.tolist() for name, tensor in exported.items()} == {"a": [1.0, 1.0], "bb": [2.0, 2.0]}


def test_a_single_file_of_any_name_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    assert list(open_export(tmp_path)) == ["a"]


def test_of_several_exports_the_usual_one_is_read_or_one_must_be_named(tmp_path: Path) -> None:
    write_index(tmp_path, "model.fp16.safetensors.index.json", {"a": "model.fp16-00001-of-00001.safetensors"})
    save_file({"b": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(
        ValueError,
        match=r"several weights \(model.fp16.safetensors.index.json, other.safetensors\): name one",
    ):
        open_export(tmp_path)
    assert list(open_export(tmp_path / "other.safetensors")) == ["b"]
    assert list(open_export(tmp_path / "model.fp16.safetensors.index.json")) == ["a"]
    save_file({"c": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(open_export(tmp_path)) == ["c"]
