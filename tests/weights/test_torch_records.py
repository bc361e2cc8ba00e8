import io
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain_weights import WeightFilesError, open_weights, read_torch_file

WEIGHTS = {"a": torch.randint(-128, 127, (64, 64), dtype=torch.int8), "b": torch.arange(1000.0)}


def rewritten(path: Path, change: Callable[[zipfile.ZipFile, zipfile.ZipInfo, bytes], None]) -> Path:
    """Write a file of `torch.save` whose records are copied one by one by `change`."""
    saved = io.BytesIO()
    torch.save(WEIGHTS, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w") as new:
        for record in old.infolist():
            change(new, record, old.read(record))
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("which", ["", "data/0", "data/1", "data.pkl"])
def test_a_compressed_record_is_refused_where_it_would_be_mapped(
    tmp_path: Path, method: int, which: str
) -> None:
    def change(new: zipfile.ZipFile, record: zipfile.ZipInfo, content: bytes) -> None:
        is_meant = record.filename.endswith(which)
        new.writestr(record.filename, content, method if is_meant else zipfile.ZIP_STORED)

    path = rewritten(tmp_path / "pytorch_model.bin", change)
    for read in (
        open_weights,
        lambda path: open_weights(path.parent),
        lambda p: read_torch_file(p, mapped=True),
    ):
        with pytest.raises(
            WeightFilesError, match=r"pytorch_model\.bin is compressed \('archive/.*\), so that"
        ):
            read(path)


def test_a_deflated_file_is_read_whole(tmp_path: Path) -> None:
    path = rewritten(
        tmp_path / "x.bin",
        lambda new, record, content: new.writestr(record.filename, content, zipfile.ZIP_DEFLATED),
    )
    found = read_torch_file(path)
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.parametrize("size", [0, 100, 4095, 4100])
def test_a_record_of_another_size_than_its_tensor_is_refused(tmp_path: Path, size: int) -> None:
    def change(new: zipfile.ZipFile, record: zipfile.ZipInfo, content: bytes) -> None:
        new.writestr(record.filename, (content * 2)[:size] if record.filename.endswith("data/0") else content)

    path = rewritten(tmp_path / "x.bin", change)
    with pytest.raises(WeightFilesError, match=rf"holds {size} bytes of a tensor of 4096 \(record 0\)"):
        open_weights(path)


def test_a_record_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    def change(new: zipfile.ZipFile, record: zipfile.ZipInfo, content: bytes) -> None:
        new.writestr(record.filename, content)
        if record.filename.endswith("data/1"):
            new.writestr(record.filename, bytes(len(content)))

    with warnings.catch_warnings(action="ignore"):  # Python's zipfile tells whoever writes one
        path = rewritten(tmp_path / "x.bin", change)
    with pytest.raises(WeightFilesError, match=r"holds the record 'archive/data/1' twice"):
        open_weights(path)


def test_whatever_torch_saves_is_mapped_as_before(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    value: dict[str, Any] = {
        **{str(dtype): torch.ones(5).to(dtype) for dtype in (
            torch.bool, torch.int8, torch.uint16, torch.int64, torch.bfloat16, torch.float64, torch.complex64,
            torch.complex128, torch.float8_e5m2,
        )},
        "parameter": torch.nn.Parameter(torch.ones(3)), "view": torch.arange(10)[2:4], "empty": torch.ones(0),
        "ordered": OrderedDict(a=torch.ones(2)), "size": torch.Size([3]),
        "list": [torch.ones(2), (torch.ones(1), None)], "dtype": torch.float32, "optimizer": optimizer.state_dict(),
        "model": model.state_dict(),
    }  # fmt: skip
    torch.save(value, tmp_path / "x.pt")
    found = read_torch_file(tmp_path / "x.pt", mapped=True)
    assert found.keys() == value.keys()
    assert torch.equal(found["view"], value["view"])
    assert torch.equal(
        found["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
