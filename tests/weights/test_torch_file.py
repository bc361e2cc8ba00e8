import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drivetrain_weights import UnsafePickleError, WeightFilesError, open_weights, read_torch_file
from drivetrain_weights.torch_file import map_tensors


def files_of(checkpoint: Path | str) -> dict[str, Path]:
    return {name: file.path for name, file in open_weights(checkpoint).items()}


class Runs:
    """What runs code where it is unpickled without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def test_tensors_and_plain_values_come_in(tmp_path: Path) -> None:
    value = {"a": torch.arange(3), "b": [1, 2.0, None, "x", (True,)], "c": {4}}
    torch.save(value, tmp_path / "x.bin")
    found = read_torch_file(tmp_path / "x.bin")
    assert torch.equal(found.pop("a"), value.pop("a"))
    assert found == value


def test_what_is_not_mapped_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save(torch.arange(5000), path)
    found = read_torch_file(path)
    path.write_bytes(b"")
    assert torch.equal(found, torch.arange(5000))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "uint32", "bool"])
def test_arrays_of_numbers_come_in_where_they_are_wanted(tmp_path: Path, dtype: str) -> None:
    numpy = pytest.importorskip("numpy")
    value = numpy.arange(6).reshape(2, 3).astype(dtype)
    torch.save({"a": value}, tmp_path / "x.pkl")
    found = read_torch_file(tmp_path / "x.pkl", arrays=True)["a"]
    assert found.dtype == value.dtype
    assert (found == value).all()
    with pytest.raises(UnsafePickleError, match=r"x\.pkl is refused: to build what it holds \(numpy"):
        read_torch_file(tmp_path / "x.pkl")


@pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\x03\x04 and no more", "cut short"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "x.bin"
    torch.save({"a": torch.arange(1000)}, path)
    path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:-200])
    with pytest.raises(WeightFilesError, match=r"x\.bin is no whole file of torch\.save"):
        read_torch_file(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "weights.pth"])
def test_one_file_and_its_folder_will_do_and_safetensors_are_preferred(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / name)
    assert files_of(tmp_path) == files_of(tmp_path / name) == {"w": tmp_path / name}
    save_file({"v": torch.ones(1)}, tmp_path / "model.safetensors")
    assert files_of(tmp_path) == {"v": tmp_path / "model.safetensors"}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda path: torch.save({"w": Runs(path.with_name("made"))}, path),
            r"is refused: to build what it holds \(posix.mkdir\) would run code",
        ),
        (
            lambda path: torch.save({"w": torch.ones(1)}, path, _use_new_zipfile_serialization=False),
            r"is no whole file of torch.save \(.*\): it was cut or damaged, or is in the format before torch 1.6",
        ),
        (lambda path: path.write_bytes(b"PK"), r"is no whole file of torch.save"),
        (lambda path: torch.save([torch.ones(1)], path), "holds a list: must be a dict of tensors by name"),
        (
            lambda path: torch.save({"model": {}, "epoch": 3}, path),
            r"holds values that are not tensors, 'model' \(dict\), 'epoch' \(int\): must be a dict of tensors",
        ),
        (lambda path: torch.save({1: torch.ones(1)}, path), "holds names that are not strings"),
    ],
)
def test_what_is_no_dict_of_tensors_is_told_and_runs_no_code(
    tmp_path: Path, make: Callable[[Path], object], told: str
) -> None:
    make(tmp_path / "model.pt")
    with pytest.raises(WeightFilesError, match=f"model.pt {told}"):
        map_tensors(tmp_path / "model.pt")
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_cut_or_missing_is_told(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "model.pt")
    os.truncate(tmp_path / "model.pt", 3000)
    with pytest.raises(
        WeightFilesError, match=r"model.pt is no whole file of .* \(.*\): it was cut or damaged"
    ):
        files_of(tmp_path)
    with pytest.raises(WeightFilesError, match=r"gone.pt is missing"):
        files_of(tmp_path / "gone.pt")
