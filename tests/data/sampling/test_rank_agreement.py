"""Ranks that read and draw for themselves, in processes of their own."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, get_worker_info

from data.reading import samples_of, shard_over_ranks


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
    loader = shard_over_ranks(DataLoader(torch.arange(24), **arguments))
    try:
        return samples_of(loader) + samples_of(loader)
    except ValueError as error:
        return str(error)


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
    first, second = run_ranks(read_twice, False, batches)
    assert sorted(first + second) == sorted(2 * list(range(24)))


class Late:
    """Batches that differ by rank from number 70 on."""

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(100):
            yield [(number + (dist.get_rank() if number >= 70 else 0)) % 100]


def said_of(make: Callable[[], Any], **options: Any) -> str:
    try:
        return f"{sum(1 for _ in shard_over_ranks(make(), **options))} steps"
    except ValueError as error:
        return str(error)


def read_late() -> str:
    return said_of(lambda: DataLoader(torch.arange(100), batch_sampler=Late()))  # pyright: ignore[reportArgumentType]


def test_batches_that_differ_late_in_an_epoch_are_an_error(run_ranks) -> None:
    assert all("Late drew another order on rank 1" in message for message in run_ranks(read_late))


class Stream(IterableDataset[int]):
    """Reads one part of 37 samples, chosen as `how` says, and of that each worker its share."""

    def __init__(self, how: str) -> None:
        self.how, self.rank = how, dist.get_rank()

    def part(self) -> tuple[int, int]:
        if self.how == "rank":
            return dist.get_rank(), dist.get_world_size()
        if self.how == "environment":
            return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return (self.rank, 2) if self.how == "constructor" else (0, 1)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        rank, count = self.part()
        return iter(range(rank, 37, count)[worker::num_workers])


class Once(IterableDataset[int]):
    """Gives its part once, as a generator that was handed to it."""

    def __init__(self, *, by_rank: bool) -> None:
        self.left = (n for n in range(dist.get_rank() * by_rank, 40, 2))

    def __iter__(self) -> Iterator[int]:
        return self.left


class Odd(IterableDataset[Any]):
    """Reads what no other rank can read, or only once, or other samples each time: nothing that is divided."""

    def __init__(self, kind: str) -> None:
        self.kind, self.left = kind, iter(range(20)) if kind == "once" else None

    def __iter__(self) -> Iterator[Any]:
        if self.left is not None:
            return self.left
        if self.kind == "generated":
            return (np.random.default_rng().random() for _ in range(20))
        if dist.get_rank() and self.kind == "absent":
            raise OSError("the file is on another machine")
        return iter(range(20) if dist.get_rank() == 0 else ())


class Files(Dataset[Any]):
    """Twelve samples, in another order on each rank if they are listed `by` rank."""

    def __init__(self, by: str = "") -> None:
        self.by, self.generator = by, np.random.default_rng(dist.get_rank())

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if self.by == "unreadable":
            raise OSError("not written yet")
        if self.by == "noise":
            return index + np.random.default_rng().random()
        if self.by == "held noise":
            return index + self.generator.random()
        if self.by == "global noise":
            return index + random.random() + np.random.rand() + torch.rand(()).item()
        return (index * 5 + 3 * (dist.get_rank() if self.by == "rank" else 0)) % 12


class ByIndex(Files):
    """As Files, without a generator, which would keep it from being compared."""

    def __init__(self, by: str) -> None:
        self.by = by


class Foreign:
    """A loader that is not torch's."""

    dataset = None

    def __init__(self, divides: bool) -> None:
        self.divides = divides

    def __iter__(self) -> Iterator[Any]:
        first = dist.get_rank() if self.divides else 0
        return iter([torch.arange(n, n + 2) for n in range(first, 20, 4)])


def parts_by_rank(slow: bool) -> dict[str, str]:
    rank = dist.get_rank()
    found: dict[str, str] = {}
    for how in ("rank", "environment", "constructor"):
        found[how] = said_of(lambda how=how: DataLoader(Stream(how), batch_size=3))
    found["everywhere"] = said_of(lambda: DataLoader(Stream("rank"), batch_size=3), dispatch=False)
    for name, options in {"once": {}, "once, everywhere": {"dispatch": False}}.items():
        found[name] = said_of(lambda: DataLoader(Once(by_rank=True), batch_size=3), **options)
    subset = Subset(range(38), range(rank, 38, 2))  # pyright: ignore[reportArgumentType]
    found["subset"] = said_of(lambda: DataLoader(subset, batch_size=2))
    found["subset, dispatched"] = said_of(lambda: DataLoader(subset, batch_size=2), dispatch=True)
    found["files"] = said_of(lambda: DataLoader(ByIndex("rank"), batch_size=2))
    found["foreign"] = said_of(lambda: Foreign(True))
    found["foreign, everywhere"] = said_of(lambda: Foreign(True), dispatch=False)
    if slow:
        found["workers"] = said_of(lambda: DataLoader(Stream("rank"), batch_size=3, num_workers=2))
        kept = {"num_workers": 1, "persistent_workers": True}
        found["kept"] = said_of(lambda: DataLoader(Stream("rank"), batch_size=3, **kept))  # pyright: ignore[reportArgumentType]
        found["files, kept"] = said_of(lambda: DataLoader(ByIndex("rank"), batch_size=2, **kept))  # pyright: ignore[reportArgumentType]
    return found


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_data_that_divides_itself_is_refused_on_every_rank(run_ranks, slow: bool) -> None:
    first, second = run_ranks(parts_by_rank, slow)
    assert first == second
    for name, said in first.items():
        assert "gives other samples on rank 1 of those that share the data than on rank 0" in said, name
        assert "Every rank must be given all of the same data" in said


def loaders_that_differ() -> list[str]:
    rank, data = dist.get_rank(), Files()
    return [
        said_of(lambda: DataLoader(Subset(range(37), range(rank, 37, 2)), batch_size=3)),  # pyright: ignore[reportArgumentType]
        said_of(lambda: DataLoader(data, batch_size=2 + rank)),
        said_of(lambda: DataLoader(data, batch_size=2, shuffle=bool(rank))),
        said_of(lambda: DataLoader(data, batch_size=2, drop_last=bool(rank))),
        said_of(lambda: DataLoader(data, batch_size=2), seed=rank),
        said_of(lambda: DataLoader(Stream("whole"), batch_size=3 + rank)),
    ]


def test_lengths_batch_sizes_orders_and_seeds_that_differ_are_refused_on_every_rank(run_ranks) -> None:
    first, second = run_ranks(loaders_that_differ)
    assert first == second
    names = "num_samples=19 batch_size=2 order='sequential' even='uneven' seed=0 batch_size=3"
    for name, said in zip(names.split(), first, strict=True):
        assert said.startswith(f"the ranks were given different data: {name} on rank 0"), said


def data_alike() -> dict[str, str]:
    found = {kind: said_of(lambda kind=kind: DataLoader(Odd(kind), batch_size=2)) for kind in ODD}
    for by in ("", "noise", "held noise", "global noise"):
        found[by] = said_of(lambda by=by: DataLoader(Files(by), batch_size=2))
    for by in ("", "noise", "global noise"):
        found[f"{by}, by index"] = said_of(lambda by=by: DataLoader(ByIndex(by), batch_size=2))
    found["worker"] = said_of(lambda: DataLoader(ByIndex("global noise"), batch_size=2, num_workers=1))
    found["whole"] = said_of(lambda: DataLoader(Stream("whole"), batch_size=3), dispatch=False)
    found["foreign"] = said_of(lambda: Foreign(False))
    for name, options in {"handed": {}, "handed, everywhere": {"dispatch": False}}.items():
        found[name] = said_of(lambda: DataLoader(Once(by_rank=False), batch_size=4), **options)
    try:
        said_of(lambda: DataLoader(ByIndex("unreadable"), batch_size=2))
    except OSError as error:
        found["unreadable"] = str(error)
    return found


ODD = ("once", "generated", "absent", "empty")


def test_data_that_is_not_divided_is_read_whatever_it_draws_and_whoever_can_read_it(run_ranks) -> None:
    first, second = run_ranks(data_alike)
    assert first == second
    assert first.pop("unreadable") == "not written yet"  # the loop's own error
    assert first.pop("whole") == "7 steps"
    assert {name: said for name, said in first.items() if name in ODD} == dict.fromkeys(ODD, "5 steps")
    assert {said for name, said in first.items() if name not in ODD} == {"3 steps"}


def reads_of_each_rank() -> list[int]:
    """How often a map-style dataset is read to be compared, and what of it a loop reads."""
    counted = Counted()
    loader = shard_over_ranks(DataLoader(counted, batch_size=2))
    before = counted.num_read
    before_draws = torch.get_rng_state()
    samples_of(loader)
    samples_of(loader)
    assert torch.equal(before_draws, torch.get_rng_state())
    return [before, counted.num_read - before]


class Counted(Dataset[int]):
    num_read = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.num_read += 1
        return index


class CountedStream(IterableDataset[int]):
    """Counts how often it is read; it could wait for ever on a rank that is not meant to read."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += 1
        return iter(range(20))


def test_samples_are_compared_once_and_nothing_more_is_read(run_ranks) -> None:
    for compared, read in run_ranks(reads_of_each_rank):
        assert 6 <= compared <= 2 * 12  # as many as time allows
        assert read == 12


def reads_of_a_dispatched_stream() -> list[int]:
    stream = CountedStream()
    loader = shard_over_ranks(DataLoader(stream, batch_size=2), dispatch=True)
    return [sum(1 for _ in loader), stream.num_read]


def test_a_stream_that_is_to_be_dispatched_is_read_by_the_first_rank_alone(run_ranks) -> None:
    assert run_ranks(reads_of_a_dispatched_stream) == [[5, 1], [5, 0]]
