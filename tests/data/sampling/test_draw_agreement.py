"""Ranks that draw for themselves, in processes of their own."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from drivetrain_data import Shard, shard_loader


class ByRank(Sampler[int]):
    """Draws alike in its first epoch, and by rank from then on if it is `wrong`."""

    def __init__(self, wrong: bool) -> None:
        self.wrong = wrong
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        key = dist.get_rank() if self.wrong and self.epoch else 7
        return iter(random.Random(key).sample(range(24), 24))


def read_twice(wrong: bool, batches: bool) -> Any:
    sampler = ByRank(wrong)
    arguments: dict[str, Any] = {"sampler": sampler, "batch_size": 2}
    if batches:
        arguments = {"batch_sampler": Pairs(sampler)}
    shard = Shard(dist.get_rank(), dist.get_world_size())
    loader = shard_loader(DataLoader(torch.arange(24), **arguments), shard, group=dist.group.WORLD)
    read = [batch.tolist() for batch in loader]
    try:
        read += [batch.tolist() for batch in loader]
    except ValueError as error:
        return str(error)
    return read


class Pairs(Sampler[list[int]]):
    def __init__(self, sampler: ByRank) -> None:
        self.sampler = sampler
        self.set_epoch = sampler.set_epoch

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        return iter([order[i : i + 2] for i in range(0, 24, 2)])


@pytest.mark.parametrize("batches", [False, True])
def test_ranks_that_draw_different_orders_are_told_so_on_all_of_them(run_ranks, batches: bool) -> None:
    name = "Pairs" if batches else "ByRank"
    for said in run_ranks(read_twice, True, batches):
        assert f"{name} drew another order on rank 1 of those that share the data than on rank 0" in said


@pytest.mark.parametrize("batches", [False, True])
def test_ranks_that_draw_the_same_read_all_of_it(run_ranks, batches: bool) -> None:
    parts = run_ranks(read_twice, False, batches)
    assert sorted(i for part in parts for batch in part for i in batch) == sorted(2 * list(range(24)))


class Late:
    """Batches that differ by rank from number 70 on."""

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(100):
            yield [(number + (dist.get_rank() if number >= 70 else 0)) % 100]


def read_late() -> str:
    shard = Shard(dist.get_rank(), dist.get_world_size())
    loader = shard_loader(DataLoader(torch.arange(100), batch_sampler=Late()), shard, group=dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    try:
        for _ in loader:
            pass
    except ValueError as error:
        return str(error)
    return ""


def test_batches_that_differ_late_in_an_epoch_are_an_error(run_ranks) -> None:
    assert all("Late drew another order on rank 1" in message for message in run_ranks(read_late))
