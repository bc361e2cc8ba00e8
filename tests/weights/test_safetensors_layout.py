from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drivetrain_weights import MappedFile, WeightFilesError
from drivetrain_weights.safetensors_layout import DTYPE_NAMES, TensorEntry, bytes_of, plan_file, read_header

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    entries = [TensorEntry(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    layout, values = plan_file(entries), list(tensors.values())
    path.write_bytes(layout.header + b"".join(bytes_of(values[index]) for index in layout.order))
    assert path.stat().st_size == layout.size_bytes


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (1,), (), (0, 4)])
def test_every_dtype_comes_back_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    path = tmp_path / "x.safetensors"
    write(path, {"x": tensor})
    back = load_file(path)["x"]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert bits(back) == bits(tensor)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {
        "wide": torch.randn(3, dtype=torch.float64),
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 2),
        "with 'quotes' and ü": torch.ones(2, dtype=torch.bfloat16),
    }
    write(tmp_path / "x.safetensors", tensors)
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_the_plan_says_where_each_tensor_lies(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([7], dtype=torch.uint8), "b": torch.arange(3.0)}
    path = tmp_path / "x.safetensors"
    write(path, tensors)
    layout = plan_file([TensorEntry("a", "U8", (1,)), TensorEntry("b", "F32", (3,))])
    content = path.read_bytes()
    assert layout.order == (1, 0)
    for start, tensor in zip(layout.starts, tensors.values(), strict=True):
        assert content[start : start + tensor.nbytes] == bits(tensor)


def test_a_header_is_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([7], dtype=torch.uint8), "b": torch.arange(3.0)}
    save_file(tensors, tmp_path / "x.safetensors", {"run": "7"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"run": "7"}
    assert list(header.entries) == ["b", "a"]
    content = (tmp_path / "x.safetensors").read_bytes()
    for name, entry in header.entries.items():
        assert content[entry.start :][: entry.size_bytes] == bits(tensors[name])


_A = '"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (f"{{{_A}, {_A}}}", "a"),
        (f"{{{_A}, {_A.replace('a', chr(92) + 'u0061', 1)}}}", "a"),  # the same name, written in another way
        (f'{{"a": {{"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, {_A}}}', "a"),
        (f'{{"__metadata__": {{"x": "1", "x": "2"}}, {_A}}}', "x"),
        (f'{{"__metadata__": {{"x": "1"}}, "__metadata__": {{"x": "2"}}, {_A}}}', "__metadata__"),
        (f"{{{_A.replace('shape', 'dtype', 1).replace('[8]', chr(34) + 'U8' + chr(34), 1)}}}", "dtype"),
    ],
)
def test_a_key_that_a_header_has_twice_is_refused(tmp_path: Path, header: str, key: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    # Some of these the library itself refuses, and takes the last of the others.
    with pytest.raises(
        WeightFilesError, match=rf"the key '{key}' twice in one object|duplicate field `{key}`"
    ):
        MappedFile(path)
