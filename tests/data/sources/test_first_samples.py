"""What ranks compare of samples of every kind, in processes of their own."""

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from data.reading import shard_over_ranks


class Plain:
    def __init__(self, value: Any, **more: Any) -> None:
        self.value = value
        vars(self).update(more)


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


@dataclass(slots=True)
class Fields:
    value: int


class Nested:
    """A graph, as it were: tensors in a mapping of an object that refers back to it."""

    def __init__(self, value: int) -> None:
        self.stored = {"nodes": Plain(torch.full((3,), value)), "owner": self}


class Unpicklable:
    def __init__(self, value: int) -> None:
        self.value, self.lock = value, threading.Lock()


class Hidden:
    """Cannot be looked into."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        raise TypeError("cannot pickle it")


MADE: dict[str, Callable[[int], Any]] = {
    "plain": Plain,
    "slots": Slots,
    "fields": Fields,
    "nested": Nested,
    "unpicklable": Unpicklable,
    "date": lambda value: datetime(2020, 1, 1) + timedelta(value),
    "set": lambda value: {f"{value}a", f"{value}b", f"{value}c"},
    "in a list": lambda value: [Plain(Slots(value)), None],
    "array of objects": lambda value: np.array([Plain(value), None], dtype=object),
    "sparse": lambda value: torch.full((2, 2), value + 1).to_sparse(),
    "with the process": lambda value: Plain(value, process=os.getpid(), started=time.monotonic()),
    "read at": lambda value: Plain(value, at=time.perf_counter(), noise=random.SystemRandom().random()),
    "with a handle": lambda value: Plain(value, file=open(os.devnull), lock=threading.Lock()),  # noqa: SIM115
    "with a device": lambda value: Plain(value, device=torch.device("cuda", dist.get_rank())),
    "with itself": lambda value: Plain(value, key={(object(),): 1}, of=Plain),
}


class Samples(Dataset[Any]):
    """Twenty samples, this rank's own part of forty if it divides them."""

    def __init__(self, kind: str, divides: bool) -> None:
        self.kind = kind
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if divides else (0, 1)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return MADE[self.kind](index * self.world_size + self.rank)


class Stream(IterableDataset[Any]):
    def __init__(self, kind: str, divides: bool) -> None:
        self.samples = kind, divides

    def __iter__(self) -> Iterator[Any]:
        samples = Samples(*self.samples)
        return (samples[index] for index in range(20))


class AlikeAtTheEnds(Dataset[int]):
    """Other samples on each rank, but for some that look like headers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        alike = index in (0, self.size // 2, self.size - 1)
        return -1 if alike else index * dist.get_world_size() + dist.get_rank()


class BehindHeaders(IterableDataset[int]):
    def __init__(self, num_headers: int) -> None:
        self.num_headers = num_headers

    def __iter__(self) -> Iterator[int]:
        yield from [-1] * self.num_headers
        yield from range(dist.get_rank(), 37, dist.get_world_size())


class Failing(Dataset[int]):
    """Can be read on the first rank alone."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if dist.get_rank():
            raise OSError("no such disk here")
        return index


class FailingStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        if dist.get_rank():
            raise OSError("no such disk here")
        return iter(range(4))


class Slow(Dataset[int]):
    num_read = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        self.num_read += 1
        time.sleep(0.1)
        return index


def said_of(dataset: Any, batch_size: int = 2, **options: Any) -> str:
    loader = DataLoader(dataset, batch_size=batch_size, collate_fn=len)
    try:
        next(iter(shard_over_ranks(loader, **options)))
    except ValueError as error:
        return str(error)
    return "read"


def objects(divides: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind in MADE:
        found[kind] = said_of(Samples(kind, divides))
        found[f"{kind}, stream"] = said_of(Stream(kind, divides))
        found[f"{kind}, stream on every rank"] = said_of(Stream(kind, divides), dispatch=False)
    return found


def test_objects_are_compared_by_what_they_hold(run_ranks) -> None:
    first, second = run_ranks(objects, True)
    assert first == second
    assert [kind for kind, said in first.items() if "gives other samples on rank 1" not in said] == []


def test_what_a_process_or_a_read_has_of_its_own_does_not_count(run_ranks) -> None:
    first, second = run_ranks(objects, False)
    assert first == second
    assert {kind: said for kind, said in first.items() if said != "read"} == {}


def alike_at_first() -> dict[str, str]:
    found = {str(size): said_of(AlikeAtTheEnds(size)) for size in (5, 20, 1001)}
    for number in (1, 3, 7):
        found[f"{number} headers"] = said_of(BehindHeaders(number), batch_size=1 + number // 2)
    return found


def test_data_that_is_alike_in_some_places_is_compared_in_others(run_ranks) -> None:
    first, second = run_ranks(alike_at_first)
    assert first == second
    assert [kind for kind, said in first.items() if "gives other samples on rank 1" not in said] == []


def warned() -> dict[str, list[str]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("drivetrain_data").addHandler(handler)
    found: dict[str, list[str]] = {}
    MADE["hidden"] = Hidden
    MADE["hidden, with a number"] = lambda value: (value, Hidden(value))
    datasets = {"failing": Failing(), "failing stream": FailingStream()}
    datasets |= {kind: Samples(kind, divides=False) for kind in ("hidden", "hidden, with a number", "plain")}
    datasets["hidden stream"] = Stream("hidden", divides=False)
    for name, dataset in datasets.items():
        loader = shard_over_ranks(DataLoader(dataset, collate_fn=len))
        for _ in range(0 if name == "failing" else 2):
            next(iter(loader))
        found[name] = [record.getMessage() for record in records]
        records.clear()
    return found


def test_the_first_rank_warns_once_of_what_could_not_be_compared(run_ranks) -> None:
    first, second = run_ranks(warned)
    assert set(map(str, second.values())) == {"[]"}
    assert first["plain"] == first["hidden, with a number"] == []
    for name in ("failing", "failing stream"):
        (said,) = first[name]
        assert "between the ranks that share the data: on rank 1 reading" in said, name
        assert "raised OSError('no such disk here')" in said, name
    for name in ("hidden", "hidden stream"):
        (said,) = first[name]
        assert "on rank 0 its samples have no values that can be compared" in said, name


def reads_of_a_slow_dataset() -> int:
    slow = Slow()
    shard_over_ranks(DataLoader(slow))
    return slow.num_read


def test_few_samples_are_compared_of_a_dataset_that_takes_long(run_ranks) -> None:
    assert run_ranks(reads_of_a_slow_dataset) == [6, 6]
