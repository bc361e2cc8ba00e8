import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_state.collectives.buckets import (
    Bucket,
    as_bytes,
    buckets,
    cut,
    map_buckets,
    pack,
    unpack,
    unpack_rows,
)

shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=5)


def _filled(shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).reshape(shape)


def _all(chosen: list[tuple[int, ...]]) -> list[torch.Tensor]:
    return [_filled(shape, 100 * index) for index, shape in enumerate(chosen)]


@given(shapes)
def test_unpack_inverts_pack(chosen: list[tuple[int, ...]]) -> None:
    tensors = _all(chosen)
    after = list(map_buckets(tensors, lambda bucket: unpack(pack(tensors, bucket), tensors, bucket)))
    assert len(after) == len(tensors)
    assert all(map(torch.equal, tensors, after))


@given(shapes, st.integers(1, 3))
def test_rows_of_ranks_come_back_concatenated(chosen: list[tuple[int, ...]], world_size: int) -> None:
    by_rank = [[tensor + 1000 * rank for tensor in _all(chosen)] for rank in range(world_size)]

    def transfer(bucket: Bucket) -> list[torch.Tensor]:
        rows = torch.stack([pack(of_rank, bucket) for of_rank in by_rank])
        return list(unpack_rows(rows, by_rank[0], bucket))

    for index, whole in enumerate(map_buckets(by_rank[0], transfer)):
        assert torch.equal(whole, torch.cat([torch.atleast_1d(of_rank[index]) for of_rank in by_rank]))


@given(shapes, st.integers(0, 3))
def test_what_a_rank_sent_is_cut_from_its_padded_row(chosen: list[tuple[int, ...]], padding: int) -> None:
    tensors = _all(chosen)
    row = torch.cat([*(tensor.reshape(-1) for tensor in tensors), torch.zeros(padding, dtype=torch.int64)])
    assert all(map(torch.equal, tensors, cut(row, chosen)))


def test_what_is_packed_owns_its_memory() -> None:
    tensor = torch.ones(3)
    pack([tensor], [[0]]).zero_()
    assert tensor.sum() == 3


def test_one_bucket_for_each_dtype_with_a_run_for_each_shape() -> None:
    tensors = [torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(2), torch.ones(1)]
    assert buckets(tensors) == [[[0, 3], [2]], [[1]]]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint16]
)
def test_bytes_are_a_view_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    as_bytes(tensor).fill_(1)
    assert tensor.to(torch.complex64).abs().sum() > 0
