import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.loading.checkpoint_tensors import CheckpointTensors, TensorSpec
from drivetrain_dispatch.loading.tensor_reader import PIECE_BYTES, EachRank, pieces_of
from drivetrain_weights import MappedFile

shapes = st.lists(st.integers(0, 3000), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.int8, torch.bfloat16, torch.complex128])


@given(
    tensors=st.dictionaries(
        st.text(max_size=2), st.builds(TensorSpec, shapes, dtypes, st.booleans()), max_size=4
    )
)
def test_pieces_are_all_of_every_tensor_once_and_none_is_large_but_what_is_indivisible(
    tensors: dict[str, TensorSpec],
) -> None:
    tensors = {name: stored for name, stored in tensors.items() if math.prod(stored.shape) < 10**9}
    wanted = set(list(tensors)[::2])
    pieces = pieces_of(tensors, wanted, {})
    for name, (shape, dtype, divisible) in tensors.items():
        own = [piece for piece in pieces if piece.name == name]
        bounds = [(piece.start, piece.stop) for piece in own]
        assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])][: len(bounds)]
        assert (bounds[-1][1] if bounds else 0) == (math.prod(shape) if name in wanted else 0)
        assert all(0 < piece.size_bytes <= PIECE_BYTES or not divisible for piece in own)
        assert divisible or len(own) <= 1
        assert all(piece.dtype == dtype for piece in own)
    assert list(dict.fromkeys(piece.name for piece in pieces)) == [
        name for name in tensors if name in wanted and math.prod(tensors[name].shape)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.default_cases("1-dtype0", "7-dtype1")
def test_any_number_of_threads_reads_the_same(tmp_path: Path, num_threads: int, dtype: torch.dtype) -> None:
    values = {str(index): torch.rand(PIECE_BYTES // 4 + index * 1000) for index in range(5)}
    save_file(values, tmp_path / "x.safetensors")
    file = MappedFile(tmp_path / "x.safetensors")
    targets = {name: torch.empty_like(value, dtype=dtype) for name, value in values.items() if name != "3"}
    stored = {name: TensorSpec(tuple(file.tensor(name).shape), torch.float32) for name in file.in_order}
    sources = {name: LazyTensor.in_file(file, name) for name in values}
    checkpoint = CheckpointTensors(path=tmp_path, specs=stored, sources=sources)
    read_bytes: list[int] = []
    EachRank(num_threads).read(checkpoint, targets, {}, read_bytes.append)
    assert sum(read_bytes) == sum(values[name].nbytes for name in targets)
    assert all(torch.equal(target, values[name].to(dtype)) for name, target in targets.items())
