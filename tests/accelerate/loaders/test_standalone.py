"""A loader that a program prepares itself, beside the installed Accelerate's."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from drivetrain_accelerate.loaders.prepared_loader import DataLoaderDispatcher, DataLoaderShard
from drivetrain_accelerate.loaders.standalone import prepare_data_loader

real: Any = pytest.importorskip("accelerate.data_loader")


def read(prepare: Any, size: int, batch_size: int, *, drop_last: bool, **options: Any) -> list[list[int]]:
    loader = DataLoader(range(size), batch_size, drop_last=drop_last)  # pyright: ignore[reportArgumentType]
    prepared = prepare(loader, **options)
    found = [batch.tolist() for batch in prepared]
    if prepare is prepare_data_loader:  # theirs tells a wrong length for split batches that are not even
        assert len(prepared) == len(found)
    return found


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_a_process_reads_what_it_reads_with_the_real_one(
    size: int, batch_size: int, processes: int, drop_last: bool, split: bool, even: bool
) -> None:
    batch_size = batch_size * processes if split else batch_size
    options: dict[str, Any] = {"num_processes": processes, "split_batches": split, "even_batches": even}
    mine, theirs = (
        [
            read(prepare, size, batch_size, drop_last=drop_last, process_index=process, **options)
            for process in range(processes)
        ]
        for prepare in (prepare_data_loader, real.prepare_data_loader)
    )
    if even or drop_last:
        assert mine == theirs
        return
    # Their processes have unequal numbers of batches, at which a collective hangs; ours repeat one sample.
    assert len({len(batches) for batches in mine}) == 1
    assert {index for batches in mine for batch in batches for index in batch} == set(range(size))
    num_full = size // (batch_size if split else batch_size * processes)
    assert [batches[:num_full] for batches in mine] == [batches[:num_full] for batches in theirs]


def test_batches_go_to_the_device_only_if_that_is_asked_for() -> None:
    loader = DataLoader(torch.ones(4, 1), 2)  # pyright: ignore[reportArgumentType]
    stays = prepare_data_loader(loader, torch.device("meta"), 1, 0)
    goes = prepare_data_loader(loader, torch.device("meta"), 1, 0, put_on_device=True)
    assert [next(iter(each)).device.type for each in (stays, goes)] == ["cpu", "meta"]


def test_a_prepared_loader_comes_back_as_it_is() -> None:
    prepared = prepare_data_loader(DataLoader(range(4)), num_processes=1, process_index=0)  # pyright: ignore[reportArgumentType]
    assert isinstance(prepared, DataLoaderShard)
    assert prepare_data_loader(prepared) is prepared
    with pytest.raises(ValueError, match="slice_fn_for_dispatch"):
        prepare_data_loader(DataLoader(range(4)), slice_fn_for_dispatch=len)  # pyright: ignore[reportArgumentType]


def dispatched() -> tuple[list[list[int]], list[list[int]]]:
    loader = DataLoader(range(10), 2, shuffle=True)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(torch.initial_seed() % 7)
    read_by_main = prepare_data_loader(loader, dispatch_batches=True)
    assert isinstance(read_by_main, DataLoaderDispatcher)
    by_each = prepare_data_loader(loader)
    return [batch.tolist() for batch in read_by_main], [batch.tolist() for batch in by_each]


def test_two_processes_share_the_data_and_the_seed(run_ranks: Any) -> None:
    first, second = run_ranks(dispatched)
    for mine, other in zip(first, second, strict=True):
        assert sorted({index for batch in [*mine, *other] for index in batch}) == list(range(10))
        assert len(mine) == len(other) == 3
