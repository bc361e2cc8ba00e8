import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.files.weight_files import MappedFile, find_weights
from drivetrain_dispatch.offload.pages import Pages, some_missing


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and their index."""
    write(tmp_path / "model-1.safetensors", a=torch.ones(3))
    write(tmp_path / "model-2.safetensors", b=torch.zeros(2, 2), c=torch.arange(4))
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_one_file_an_index_and_their_folders_will_do(sharded: Path, tmp_path_factory) -> None:
    single = write(tmp_path_factory.mktemp("single") / "model.safetensors", a=torch.ones(1))
    assert find_weights(single) == find_weights(str(single.parent)) == {"a": single}
    places = {
        name: sharded / f"model-{number}.safetensors" for name, number in (("a", 1), ("b", 2), ("c", 2))
    }
    assert find_weights(sharded) == find_weights(sharded / "model.safetensors.index.json") == places


@pytest.mark.parametrize("name", ["model", "diffusion_pytorch_model"])
def test_a_variant_is_taken_if_it_is_alone(sharded: Path, name: str) -> None:
    index = (sharded / "model.safetensors.index.json").rename(sharded / f"{name}.safetensors.index.fp16.json")
    wanted = find_weights(index)
    assert find_weights(sharded) == wanted
    assert wanted.keys() == {"a", "b", "c"}
    write(sharded / f"{name}.fp16.safetensors", a=torch.ones(1))
    assert find_weights(sharded) == wanted  # the index tells more than a file's name
    usual = write(sharded / f"{name}.safetensors", a=torch.ones(1))
    assert find_weights(sharded) == {"a": usual}


def test_of_two_variants_one_is_to_be_named(sharded: Path) -> None:
    index = (sharded / "model.safetensors.index.json").read_text()
    for variant in ("fp16", "bf16"):
        (sharded / f"model.safetensors.index.{variant}.json").write_text(index)
    assert find_weights(sharded)  # the one without
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(
        WeightFilesError, match=r"holds several weights \(model.*bf16.json, model.*fp16.json\)"
    ):
        find_weights(sharded)


def test_a_tensor_is_the_files_pages_and_the_file_is_never_written_to(tmp_path: Path) -> None:
    path = write(tmp_path / "one.safetensors", w=torch.arange(1000.0))
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


@pytest.mark.parametrize(
    ("hurt", "told"),
    [
        (lambda folder: (folder / "model-2.safetensors").unlink(), r"model-2.safetensors is missing"),
        (
            lambda folder: os.truncate(folder / "model-2.safetensors", 150),
            r"model-2.safetensors is no whole safetensors file \(.*\): it was cut or damaged",
        ),
        (
            lambda folder: (folder / "model-1.safetensors").write_bytes(b"\0" * 100),
            r"model-1.safetensors is no whole safetensors file",
        ),
        (
            lambda folder: write(folder / "model-2.safetensors", b=torch.ones(1)),
            r"index.json names tensors that their files do not hold: 'c' \(model-2.safetensors\)",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
            r"model.safetensors.index.json is no JSON",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
            r'has no "weight_map" from tensors to files',
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'),
            r"names the file '../x': must be one beside it",
        ),
    ],
)  # fmt: skip
def test_what_is_damaged_is_named(sharded: Path, hurt, told: str) -> None:
    hurt(sharded)
    with pytest.raises(WeightFilesError, match=told):
        find_weights(sharded)


def test_what_is_no_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightFilesError, match=r"holds no \*.safetensors file"):
        find_weights(tmp_path)
    with pytest.raises(WeightFilesError, match=r"gone.safetensors is missing"):
        find_weights(tmp_path / "gone.safetensors")
    with pytest.raises(WeightFilesError, match=r"model.onnx is no model's weights: name a .safetensors file"):
        find_weights(tmp_path / "model.onnx")
    for name in ("x", "y"):
        write(tmp_path / f"{name}.safetensors", a=torch.ones(1))
    with pytest.raises(
        WeightFilesError, match=r"holds several weights \(x.safetensors, y.safetensors\): name one"
    ):
        find_weights(tmp_path)


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


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are in memory")
def test_a_file_is_opened_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    save_file({f"{index}": torch.zeros(1 << 20) for index in range(16)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    opened = MappedFile(path)
    pages = [Pages.of(opened.tensor(name)) for name in opened.in_order]
    if not some_missing(pages[8]):
        pytest.skip("this file system keeps its pages")
    # The header is there, and what the system reads ahead of itself.
    assert all(map(some_missing, pages[4:]))
    assert torch.equal(opened.tensor("8"), torch.zeros(1 << 20))


def test_tensors_of_a_file_are_changed_and_saved_each_for_itself(tmp_path: Path) -> None:
    save_file({"one": torch.zeros(100), "other": torch.ones(100)}, tmp_path / "some.safetensors")
    file = MappedFile(tmp_path / "some.safetensors")
    version = file.tensor("other")._version
    file.tensor("one").add_(1)
    assert file.tensor("other")._version == version
    torch.save({"one": file.tensor("one")}, tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 3000
