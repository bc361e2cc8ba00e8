"""Every setting of the data section reaches the loader."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Accelerator


class Counting(IterableDataset[int]):
    """Ten thousand samples of 40 kB, of which `read` were asked for."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(100):
            self.read += 1
            yield torch.full((10_000,), float(index))


def first_batches(data: dict[str, Any], shuffle: bool = False) -> list[int]:
    accelerator = Accelerator(cpu=True, seed=0, data=data)
    loader = accelerator.prepare(DataLoader(torch.arange(12), batch_size=4, shuffle=shuffle))
    return next(iter(loader)).tolist()


def samples_read_at_the_first_batch(read_ahead: bool) -> int:
    accelerator = Accelerator(cpu=True, data={"read_ahead": read_ahead})
    stream = Counting()
    batches = iter(accelerator.prepare(DataLoader(stream, batch_size=4)))
    next(batches)
    read = stream.read
    batches.close()
    return read


@pytest.mark.parametrize(
    ("data", "by_rank"),
    [
        ({}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"strategy": "block"}, [[0, 1, 2, 3], [6, 7, 8, 9]]),
        ({"strategy": "node"}, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # two ranks of one node
        ({"split_batches": True}, [[0, 1], [2, 3]]),
        ({"dispatch": True}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_ranks_read_what_the_settings_say(run_ranks, data: dict[str, Any], by_rank: list[list[int]]) -> None:
    assert run_ranks(first_batches, data) == by_rank


def test_the_seed_of_the_data_decides_the_order(run_ranks) -> None:
    orders = [run_ranks(first_batches, {"seed": seed}, True) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_reading_ahead_reads_the_next_message_before_the_loop_has_this_one(run_ranks) -> None:
    behind, ahead = (run_ranks(samples_read_at_the_first_batch, each)[0] for each in (False, True))
    assert ahead > behind
