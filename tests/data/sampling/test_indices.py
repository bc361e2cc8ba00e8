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


def test_a_sampler_may_give_more_than_its_length() -> None:
    assert len(list(shard_loader(built(batch_size=2, sampler=Longer()), Shard(0, 1)))) == 15
