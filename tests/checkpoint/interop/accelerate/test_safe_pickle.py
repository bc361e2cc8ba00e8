import os
from pathlib import Path

import pytest
import torch

from drivetrain_checkpoint import CorruptCheckpointError, ForeignStateError
from drivetrain_checkpoint.interop.accelerate.safe_pickle import read_pickle


class Runs:
    """What pickle would run a command for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_arrays_of_numbers_come_in(tmp_path: Path, dtype: str) -> None:
    numpy = pytest.importorskip("numpy")
    value = numpy.arange(6).reshape(2, 3).astype(dtype)
    torch.save({"a": value}, tmp_path / "x.pkl")
    found = read_pickle(tmp_path / "x.pkl")["a"]
    assert found.dtype == value.dtype
    assert (found == value).all()


def test_what_would_run_code_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    torch.save({"a": Runs(tmp_path / "made")}, tmp_path / "x.pkl")
    with pytest.raises(ForeignStateError, match=r"x\.pkl holds more than tensors .*\(posix\.mkdir\)"):
        read_pickle(tmp_path / "x.pkl")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\x03\x04 and no more"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"x\.bin is no whole file of torch\.save"):
        read_pickle(tmp_path / "x.bin")
