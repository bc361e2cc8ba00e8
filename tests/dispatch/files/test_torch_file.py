import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain_dispatch import init_empty_weights
from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.files.torch_file import map_pickled
from drivetrain_dispatch.files.weight_files import MappedFile, find_weights
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model


class Runs:
    """What runs code where it is unpickled without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1500, 1600), nn.Linear(3, 3))


@pytest.fixture
def values(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A model's values, one of them saved with its dims swapped, as two files and their index."""
    values = dict(model().state_dict())
    values["0.weight"] = torch.randn(1500, 1600).T
    files = {name: f"pytorch_model-{index % 2}.bin" for index, name in enumerate(values)}
    for file in set(files.values()):
        torch.save({name: values[name] for name, own in files.items() if own == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return values


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_model_gets_its_values_from_torchs_files(
    tmp_path: Path, values: dict[str, torch.Tensor], place: str, dtype: torch.dtype | None
) -> None:
    with init_empty_weights():
        empty = model()
    report = load_checkpoint_in_model(empty, tmp_path, {"": place}, dtype=dtype)
    for name, tensor in empty.state_dict().items():
        assert torch.equal(tensor, values[name].to(tensor.dtype))
        assert tensor.dtype == (dtype or torch.float32 if place == "cpu" else torch.float32)
    if place == "disk":
        assert report.mapped["0.weight"].path == tmp_path / "pytorch_model-0.bin"
        assert report.converted_at_use == ({} if dtype is None else dict.fromkeys(values, dtype))
        os.utime(tmp_path / "pytorch_model-0.bin", ns=(0, 0))
        with pytest.raises(WeightFilesError, match="has changed since the model was loaded"):
            report.mapped["0.weight"].check_unchanged()


def test_a_tensor_is_the_files_pages_and_the_file_is_never_written_to(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "one.pt")
    tensor = MappedFile(tmp_path / "one.pt").tensor("w")
    tensor.zero_()
    assert torch.equal(MappedFile(tmp_path / "one.pt").tensor("w"), torch.arange(1000.0))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "weights.pth"])
def test_one_file_and_its_folder_will_do_and_safetensors_are_preferred(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / name)
    assert find_weights(tmp_path) == find_weights(tmp_path / name) == {"w": tmp_path / name}
    save_file({"v": torch.ones(1)}, tmp_path / "model.safetensors")
    assert find_weights(tmp_path) == {"v": tmp_path / "model.safetensors"}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda path: torch.save({"w": Runs(path.with_name("made"))}, path),
            "is refused: to build what it holds would run code",
        ),
        (
            lambda path: torch.save({"w": torch.ones(1)}, path, _use_new_zipfile_serialization=False),
            "cannot be mapped .* format before torch 1.6",
        ),
        (lambda path: path.write_bytes(b"PK"), r"cannot be mapped|is refused"),
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
        map_pickled(tmp_path / "model.pt")
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_cut_or_missing_is_told(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "model.pt")
    os.truncate(tmp_path / "model.pt", 3000)
    with pytest.raises(WeightFilesError, match=r"model.pt cannot be mapped \(.*\): it was cut or damaged"):
        find_weights(tmp_path)
    with pytest.raises(WeightFilesError, match=r"gone.pt is missing"):
        find_weights(tmp_path / "gone.pt")
