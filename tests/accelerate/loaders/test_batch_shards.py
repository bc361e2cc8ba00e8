"""Which indices each process reads, beside the installed Accelerate's samplers."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from drivetrain_accelerate.loaders import batch_shards
from drivetrain_accelerate.loaders.prepared_loader import get_sampler

real: Any = pytest.importorskip("accelerate.data_loader")

SIZES = st.tuples(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5))


def outcome(call: Any) -> Any:
    try:
        return call()
    except ValueError:
        return ValueError


def batches(size: int, batch_size: int, *, drop_last: bool) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(size)), batch_size, drop_last)


class Numbers(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size


@given(SIZES, st.booleans(), st.booleans(), st.booleans())
def test_a_process_gets_the_batches_of_the_real_one(
    sizes: tuple[int, int, int], drop_last: bool, split: bool, even: bool
) -> None:
    size, batch_size, processes = sizes
    for process in range(processes):

        def read(module: Any, process: int = process) -> Any:
            plain = batches(size, batch_size, drop_last=drop_last)
            shard = module.BatchSamplerShard(plain, processes, process, split, even)
            return list(shard), len(shard), shard.total_length, shard.batch_size, shard.drop_last

        assert outcome(lambda: read(batch_shards)) == outcome(lambda: read(real))


@given(SIZES, st.booleans(), st.booleans())
def test_a_process_gets_the_samples_of_the_real_one(
    sizes: tuple[int, int, int], drop_last: bool, split: bool
) -> None:
    size, batch_size, processes = sizes
    assume(not split or batch_size % processes == 0)
    for process in range(processes):
        arguments = (batch_size, drop_last, processes, process, split)
        mine = batch_shards.IterableDatasetShard(Numbers(size), *arguments)
        theirs = real.IterableDatasetShard(Numbers(size), *arguments)
        assert list(mine) == list(theirs)
        assert len(mine) == len(list(mine))  # theirs is wrong where batches are split
        assert split or len(mine) == len(theirs)


def test_parts_that_are_not_equal_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=3 must be a multiple of the 2"):
        batch_shards.IterableDatasetShard(Numbers(4), 3, num_processes=2, split_batches=True)
    for size in (3, None):
        with pytest.raises(ValueError, match=f"batch_size={size} must be a multiple of the 2"):
            batch_shards.BatchSamplerShard(Batches([[0]], batch_size=size), 2, 0, split_batches=True)


class Batches(BatchSampler):
    """Batches as a program lists them, with the attributes that it gives them."""

    def __init__(self, listed: list[list[int]], **said: Any) -> None:
        self.listed = listed
        vars(self).update(said)

    def __iter__(self) -> Any:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)


LISTED = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=9)


@given(
    LISTED, st.integers(1, 4), st.booleans(), st.sampled_from(({}, {"batch_size": None}, {"drop_last": True}))
)
def test_batches_of_other_sizes_are_those_of_the_real_one(
    listed: list[list[int]], processes: int, even: bool, said: dict[str, Any]
) -> None:
    for process in range(processes):
        mine, theirs = (
            module.BatchSamplerShard(Batches(listed, **said), processes, process, even_batches=even)
            for module in (batch_shards, real)
        )
        assert (list(mine), len(mine)) == (list(theirs), len(theirs))


@given(LISTED, st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_no_sample_is_lost_where_batches_have_not_the_size_that_is_said(
    listed: list[list[int]], processes: int, split: bool, even: bool, drop_last: bool
) -> None:
    said = {"batch_size": 4 * processes if split else 2, "drop_last": drop_last}
    by_process = [
        list(batch_shards.BatchSamplerShard(Batches(listed, **said), processes, process, split, even))
        for process in range(processes)
    ]
    kept = listed
    if drop_last:
        kept = listed[:-1] if split else listed[: max(0, len(listed) - 1) // processes * processes]
    read = [index for batches in by_process for batch in batches for index in batch]
    assert set(read) >= {index for batch in kept for index in batch}
    if even:
        assert len({len(batches) for batches in by_process}) == 1


@pytest.mark.parametrize(("seed", "of_generator"), [(3, None), (None, None), (2, 5)])
def test_the_seedable_order_is_the_real_one(seed: int | None, of_generator: int | None) -> None:
    found: list[Any] = []
    for module in (batch_shards, real):
        generator = None if of_generator is None else torch.Generator().manual_seed(of_generator)
        sampler = module.SeedableRandomSampler(range(9), data_seed=seed, generator=generator)
        orders = [list(sampler), list(sampler)]
        sampler.set_epoch(7)
        found.append((orders, list(sampler), sampler.epoch, sampler.initial_seed))
    assert found[0] == found[1]


def test_skipped_batches_are_left_out() -> None:
    for skip in (0, 2, 4):
        mine, theirs = (
            module.SkipBatchSampler(batches(7, 2, drop_last=False), skip) for module in (batch_shards, real)
        )
        assert list(mine) == list(theirs)
        assert (len(mine), mine.total_length) == (len(theirs), theirs.total_length)
    assert len(batch_shards.SkipBatchSampler(batches(7, 2, drop_last=False), 9)) == 0


def test_the_sampler_of_a_loader_is_found_as_the_real_one_finds_it() -> None:
    numbers: Any = range(4)
    for loader in (
        DataLoader(numbers, 2, shuffle=True),
        DataLoader(numbers, batch_size=None),
        DataLoader(Numbers(3)),
        DataLoader(numbers, batch_sampler=batches(4, 2, drop_last=False)),
    ):
        assert get_sampler(loader) is real.get_sampler(loader)
    plain = batches(4, 2, drop_last=False)
    skipping = DataLoader(range(4), batch_sampler=batch_shards.SkipBatchSampler(plain, 1))  # pyright: ignore[reportArgumentType]
    assert get_sampler(skipping) is plain.sampler
