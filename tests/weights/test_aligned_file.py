from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from drivetrain_weights import MappedFile, WeightFilesError
from drivetrain_weights.aligned_file import write_aligned
from drivetrain_weights.safetensors_layout import is_padding

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape, dtype = draw(st.lists(st.integers(0, 9), max_size=3)), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    numel = torch.Size(shape).numel()
    made = torch.randint(0, 2, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    made = made.view(dtype).view(shape)
    return made.transpose(0, -1) if made.dim() > 1 and draw(st.booleans()) else made


def same(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


@given(st.dictionaries(names, tensors(), max_size=6))
def test_every_tensor_begins_at_a_multiple_of_64_bytes(given_tensors: dict[str, Tensor]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "some.safetensors"
        write_aligned(given_tensors, path)
        file = MappedFile(path)
        assert list(file.in_order) == sorted(given_tensors, key=lambda name: file.start_of(name) or 0)
        assert file.names == given_tensors.keys()
        for name, tensor in given_tensors.items():
            assert file.start_of(name) is not None
            assert (file.start_of(name) or 0) % 64 == 0
            assert tensor.numel() == 0 or file.tensor(name).data_ptr() % 64 == 0
            assert same(file.tensor(name), tensor)
        with safe_open(path, framework="pt") as reader:  # as anybody reads it
            assert {name for name in reader.keys() if not is_padding(name)} == given_tensors.keys()  # noqa: SIM118
            assert reader.metadata() == {"format": "pt"}
            assert all(same(reader.get_tensor(name), tensor) for name, tensor in given_tensors.items())
        assert path.stat().st_size <= 64 * (3 * len(given_tensors) + 3) + 200 * len(given_tensors) + sum(
            tensor.nbytes for tensor in given_tensors.values()
        )


def test_tensors_of_one_memory_are_each_written(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    write_aligned(
        {"all": base, "odd": base[1::2], "back": torch.randn(3, dtype=torch.complex64).conj()}, tmp_path / "x"
    )
    with safe_open(tmp_path / "x", framework="pt") as reader:
        assert torch.equal(reader.get_tensor("all"), base)
        assert torch.equal(reader.get_tensor("odd"), base[1::2])


def test_tensors_lie_in_the_order_in_which_they_are_given(tmp_path: Path) -> None:
    write_aligned(
        {"z": torch.zeros(3), "a": torch.zeros(1, dtype=torch.int8), "m": torch.zeros(9)}, tmp_path / "x"
    )
    path = (tmp_path / "x").rename(tmp_path / "x.safetensors")
    assert MappedFile(path).in_order == ("z", "a", "m")


def test_what_no_file_holds_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(WeightFilesError, match=r"'weight' is of torch.complex128, .* keep it on 'cpu'"):
        write_aligned({"weight": torch.zeros(1, dtype=torch.complex128)}, path)
    for name in ("__drivetrain_padding__/0", "__metadata__"):
        with pytest.raises(WeightFilesError, match="reserved name"):
            write_aligned({name: torch.zeros(1)}, path)
    assert list(tmp_path.iterdir()) == []
