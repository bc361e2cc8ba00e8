import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drivetrain_weights import MappedFile, WeightFilesError


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_tensor_is_the_files_pages_and_the_file_is_never_written_to(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"one.{kind}"
    {"safetensors": save_file, "pt": torch.save}[kind]({"w": torch.arange(1000.0)}, path)
    tensor = MappedFile(path).tensor("w")
    assert torch.equal(tensor, torch.arange(1000.0))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    bounds = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped]
    assert any(start <= tensor.data_ptr() < end for start, end in bounds)
    tensor.zero_()
    assert torch.equal(MappedFile(path).tensor("w"), torch.arange(1000.0))


def test_a_file_that_was_written_to_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "one.safetensors", w=torch.ones(3))
    mapped = MappedFile(path)
    mapped.check_unchanged()
    os.utime(path, ns=(0, 0))
    with pytest.raises(
        WeightFilesError, match=r"one.safetensors has changed since the model was loaded from it"
    ):
        mapped.check_unchanged()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_file_that_was_replaced_or_deleted_is_still_read(tmp_path: Path, is_replaced: bool) -> None:
    path = write(tmp_path / "one.safetensors", w=torch.ones(3))
    mapped = MappedFile(path)
    path.unlink()
    if is_replaced:
        write(path, w=torch.zeros(3))
    mapped.check_unchanged()
    copied = torch.zeros(3)
    mapped.copy("w", copied, buffer=torch.empty(0, dtype=torch.uint8))
    assert torch.equal(copied, torch.ones(3))
    assert torch.equal(mapped.tensor("w"), torch.ones(3))
    with pytest.raises(WeightFilesError, match="has changed since the model was loaded"):
        mapped.check_in_place()


def test_a_file_that_is_let_go_is_closed(tmp_path: Path) -> None:
    opened = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        MappedFile(write(tmp_path / "one.safetensors", w=torch.ones(3)))
    assert len(list(Path("/proc/self/fd").iterdir())) == opened


@pytest.mark.parametrize("converted", [None, torch.float64])
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint16, torch.int64, torch.bfloat16, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex64],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_any_elements_of_any_dtype_are_copied(
    tmp_path: Path, kind: str, dtype: torch.dtype, converted: torch.dtype | None
) -> None:
    path = tmp_path / f"one.{kind}"
    value = torch.randint(0, 2, (5, 6), dtype=torch.uint8).to(dtype)
    tensors = {"first": torch.ones(3, dtype=torch.uint8), "w": value}
    save_file(tensors, path) if kind == "safetensors" else torch.save(tensors, path)
    file = MappedFile(path)
    target = torch.zeros(30, dtype=dtype if dtype.is_complex else converted or dtype)
    buffer = torch.empty(1000, dtype=torch.uint8)
    assert file.divisible("w")
    file.copy("w", target[7:20], start=7, buffer=buffer)
    wanted = torch.zeros_like(target)
    wanted[7:20] = value.view(-1)[7:20].to(target.dtype)
    assert torch.equal(target.view(torch.uint8), wanted.view(torch.uint8))


def test_tensors_of_a_file_are_changed_and_saved_each_for_itself(tmp_path: Path) -> None:
    save_file({"one": torch.zeros(100), "other": torch.ones(100)}, tmp_path / "some.safetensors")
    file = MappedFile(tmp_path / "some.safetensors")
    version = file.tensor("other")._version
    file.tensor("one").add_(1)
    assert file.tensor("other")._version == version
    torch.save({"one": file.tensor("one")}, tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 3000
