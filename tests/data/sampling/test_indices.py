from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from drivetrain_data import Shard, own_seed, shard_loader


class Endless(Sampler[int]):
    """Never ends."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(10).tolist()


class WithLength(Endless):
    def __init__(self, length: float) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length  # pyright: ignore[reportReturnType] not all are integers


class EndlessBatches(Endless):
    """Batches that never end, with a length."""

    def __iter__(self) -> Iterator[Any]:
        return ([index, index] for index in super().__iter__())

    def __len__(self) -> int:
        return 10


class Longer(Sampler[int]):
    """Gives three times its length."""

    def __iter__(self) -> Iterator[int]:
        return iter([*range(10)] * 3)

    def __len__(self) -> int:
        return 10


def built(**options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(10), **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "loader",
    [
        built(batch_size=2, sampler=Endless()),
        built(batch_sampler=BatchSampler(Endless(), 2, drop_last=False)),
        built(batch_size=2, sampler=WithLength(float("inf"))),
        built(batch_sampler=EndlessBatches()),
    ],
)
def test_batches_of_a_sampler_without_an_end_come_for_ever(loader: DataLoader[Any]) -> None:
    assert own_seed(loader) is None
    batches = iter(shard_loader(loader, Shard(1, 2)))
    assert all(len(next(batches)) == 2 for _ in range(200))


@pytest.mark.parametrize(
    "loader",
    [
        built(batch_size=2, sampler=WithLength(10)),
        built(batch_sampler=BatchSampler(WithLength(10), 2, drop_last=False)),
    ],
)
def test_a_sampler_that_goes_on_far_beyond_its_length_is_refused(loader: DataLoader[Any]) -> None:
    with pytest.raises(
        ValueError, match=r"WithLength has a length of 10, gave \d+ items and has not ended; epoch 0"
    ):
        next(iter(shard_loader(loader, Shard(0, 1))))


@pytest.mark.parametrize("length", [2**27 + 1, 2**40, 2**62])
@pytest.mark.parametrize("in_batches", [False, True])
def test_a_length_that_no_draw_can_have_is_refused_before_anything_is_drawn(
    length: int, in_batches: bool
) -> None:
    class Counting(WithLength):
        num_drawn = 0

        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                self.num_drawn += 1
                assert self.num_drawn < 100, "it is drawn"
                yield index

    sampler = Counting(length)
    batches = BatchSampler(sampler, 1, drop_last=False)
    loader = built(batch_sampler=batches) if in_batches else built(batch_size=2, sampler=sampler)
    with pytest.raises(
        ValueError, match=rf"has a length of {length}, and .* is drawn whole, which allows at most \d+ items"
    ):
        next(iter(shard_loader(loader, Shard(0, 1))))


def test_a_length_beyond_that_of_sequences_is_none() -> None:
    loader = shard_loader(built(batch_size=2, sampler=WithLength(2**64)), Shard(0, 1))
    assert len(next(iter(loader))) == 2


def test_a_sampler_may_give_more_than_its_length() -> None:
    assert len(list(shard_loader(built(batch_size=2, sampler=Longer()), Shard(0, 1)))) == 15
