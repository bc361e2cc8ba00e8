import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_state.buckets import as_bytes, buckets, flat, map_buckets, split_by_rank, unflat

shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=5)


def _filled(shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).reshape(shape)


@given(shapes)
def test_unflat_inverts_flat(chosen: list[tuple[int, ...]]) -> None:
    tensors = [_filled(shape, 100 * index) for index, shape in enumerate(chosen)]
    for before, after in zip(tensors, unflat(flat(tensors), tensors), strict=True):
        assert torch.equal(before, after)


@given(shapes, st.integers(0, 3))
def test_what_a_rank_sent_is_cut_from_its_padded_row(chosen: list[tuple[int, ...]], padding: int) -> None:
    tensors = [_filled(shape, 100 * index) for index, shape in enumerate(chosen)]
    row = torch.cat([flat(tensors), torch.zeros(padding, dtype=torch.int64)])
    for before, after in zip(tensors, split_by_rank(row, chosen), strict=True):
        assert torch.equal(before, after)


def test_flat_owns_its_memory() -> None:
    tensor = torch.ones(3)
    flat([tensor]).zero_()
    assert tensor.sum() == 3


def test_one_bucket_for_each_dtype() -> None:
    tensors = [torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(2)]
    assert buckets(tensors) == [[0, 2], [1]]


def test_results_come_back_in_the_order_of_the_tensors() -> None:
    tensors = [torch.tensor(0.0), torch.tensor(1), torch.tensor(2.0)]
    results = map_buckets(tensors, lambda positions: [tensors[position] + 10 for position in positions])
    assert [result.item() for result in results] == [10, 11, 12]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint16]
)
def test_bytes_are_a_view_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    as_bytes(tensor).fill_(1)
    assert tensor.to(torch.complex64).abs().sum() > 0
