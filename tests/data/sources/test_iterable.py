import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from data.reading import resumed, samples_of
from drivetrain_data import Shard, shard_loader, skip_first_batches


class Stream(IterableDataset[int]):
    """The numbers up to `length`; workers, if they are told apart, share them."""

    def __init__(self, length: int, *, shared: bool = False) -> None:
        self.length = length
        self.shared = shared
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None or not self.shared:
            return iter(range(self.start, self.length))
        return iter(range(self.start + info.id, self.length, info.num_workers))


class Shuffled(Stream):
    """The same numbers, drawn one by one with the global generators."""

    def __iter__(self) -> Iterator[int]:
        left = list(super().__iter__())
        while left:
            chances = torch.rand(()).item(), np.random.rand(), random.random()
            yield left.pop(int(len(left) * (sum(chances) % 1)))


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 3, 8, 9, 17])
@pytest.mark.parametrize("even", ["uneven", "pad"])
def test_each_shard_keeps_its_part(make_shards, read_together, count: int, length: int, even: str) -> None:
    shards = make_shards(lambda: DataLoader(Sized(length), batch_size=2), count, even=even)
    read = read_together(shards)
    assert read.samples == list(range(length))
    assert len(read.plans) == len(shards[0])
    assert [plan.is_last for plan in read.plans] == [False] * (len(read.plans) - 1) + [True] * bool(
        read.plans
    )


def test_steps_are_those_of_a_map_style_dataset(make_shards, read_together) -> None:
    stream = read_together(make_shards(lambda: DataLoader(Stream(17), batch_size=2), 3))
    indexed = read_together(make_shards(lambda: DataLoader(torch.arange(17), batch_size=2), 3))
    assert stream.held == indexed.held
    assert stream.plans == indexed.plans


@pytest.mark.parametrize("arguments", [{"even": "drop"}, {"split_batches": True}])
def test_a_tail_can_be_dropped_and_a_batch_split(make_shards, read_together, arguments) -> None:
    read = read_together(make_shards(lambda: DataLoader(Stream(17), batch_size=4), 2, **arguments))
    assert read.samples == list(range(16 if "even" in arguments else 17))


def test_items_that_are_batches_themselves_are_dealt_out_in_turn() -> None:
    items = [torch.arange(3) + 3 * i for i in range(5)]
    loaders = [DataLoader(IterableWrapper(items), batch_size=None) for _ in range(2)]
    shards = [shard_loader(loader, Shard(index, 2)) for index, loader in enumerate(loaders)]
    steps = [[item.tolist() for item in step] for step in zip(*shards, strict=True)]
    assert steps == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]], [[12, 13, 14], [12, 13, 14]]]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])  # torch warns of more than the machine has cores
@pytest.mark.default_cases("2-2")
def test_workers_share_the_stream_as_without_shards(
    make_shards, read_together, count: int, workers: int
) -> None:
    shards = make_shards(
        lambda: DataLoader(Stream(23, shared=True), batch_size=2, num_workers=workers), count
    )
    assert sorted(read_together(shards).samples) == list(range(23))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.default_cases("2-1")
def test_several_workers_go_on_where_each_stood(make_shards, read_together, before: int, after: int) -> None:
    def build() -> DataLoader[int]:
        return DataLoader(Stream(31, shared=True), batch_size=2, num_workers=2)

    part = read_together(make_shards(build, before), 3)
    assert sum(part.states[-1]["extra"]["received"]) == part.states[-1]["position"]
    rest = read_together(make_shards(build, after, part.states[-1]))
    assert sorted(part.samples + rest.samples) == list(range(31))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.slow
def test_a_stream_that_draws_yields_the_same_on_every_shard_and_after_a_resume(
    make_shards, read_together, workers: int
) -> None:
    def build() -> DataLoader[int]:
        return DataLoader(Shuffled(31, shared=True), batch_size=2, num_workers=workers)

    def drawn(count: int, num_steps: int | None = None) -> Any:
        torch.manual_seed(count)  # what the program itself has drawn differs
        return read_together(make_shards(build, count, seed=3), num_steps)

    whole = drawn(1).samples
    assert sorted(whole) == list(range(31)) != whole
    assert sorted(drawn(2).samples) == list(range(31))
    if workers < 2:  # several take turns by batches, whose size in all differs
        assert drawn(2).samples == whole
    part = drawn(2, 4)
    torch.rand(7)
    rest = read_together(make_shards(build, 1, part.states[-1], seed=3))
    assert sorted(part.samples + rest.samples) == list(range(31))


def test_another_number_of_workers_is_refused() -> None:
    def loader(workers: int) -> Any:
        return shard_loader(DataLoader(Stream(9, shared=True), num_workers=workers), Shard(0, 1))

    with pytest.raises(ValueError, match=r"num_workers=2 and this loader has 1: each worker reads a part"):
        resumed(loader(1), loader(2))
    with pytest.raises(RuntimeError, match="read by 2 workers cannot be found without reading"):
        list(skip_first_batches(loader(2), 1))


def test_going_on_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    loader = shard_loader(DataLoader(Stream(9), batch_size=2), Shard(0, 1))
    with caplog.at_level(logging.WARNING):
        assert samples_of(skip_first_batches(loader, 3)) == [6, 7, 8]
    assert "going on at sample 6 of a stream: Stream is read and dropped up to there" in caplog.text


def begin_at_three(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.start = 3


def test_a_workers_set_up_reaches_the_dataset_after_a_resume_too() -> None:
    loader = shard_loader(DataLoader(Stream(9), num_workers=1, worker_init_fn=begin_at_three), Shard(0, 1))
    assert samples_of(loader) == list(range(3, 9))
    loader.load_state_dict({**loader.state_dict(), "position": 2})
    assert samples_of(loader) == list(range(5, 9))


def test_a_stream_without_a_length_has_none() -> None:
    with pytest.raises(TypeError, match="no len"):
        len(shard_loader(DataLoader(Stream(9)), Shard(0, 1)))


@pytest.mark.parametrize(("before", "after"), [((0, False), (1, False)), ((1, True), (0, False))])
def test_one_worker_draws_as_none(before: tuple[int, bool], after: tuple[int, bool]) -> None:
    def build(workers: tuple[int, bool]) -> Any:
        loader = DataLoader(Shuffled(31), batch_size=2, num_workers=workers[0], persistent_workers=workers[1])
        return shard_loader(loader, Shard(0, 1), seed=3)

    first = build(before)
    list(first)
    whole = samples_of(first)
    first.set_epoch(1)
    assert samples_of(first, 5) + samples_of(resumed(build(after), first)) == whole


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.default_cases("1")
def test_what_workers_that_live_on_draw_depends_on_the_epoch_alone(workers: int) -> None:
    def build(*, persistent: bool) -> Any:
        loader = DataLoader(
            Shuffled(40, shared=True), batch_size=2, num_workers=workers, persistent_workers=persistent
        )
        return shard_loader(loader, Shard(0, 1), seed=3)

    living = build(persistent=True)
    epochs = [samples_of(living) for _ in range(3)]
    assert epochs[0] != epochs[1]
    anew = build(persistent=False)
    anew.set_epoch(2)
    assert samples_of(anew) == epochs[2]
    living.set_epoch(1)
    begun = samples_of(living, 5)
    again = resumed(build(persistent=True), living)
    assert begun + samples_of(again) == epochs[1]
    assert samples_of(again) == epochs[2]


@pytest.mark.parametrize("num_steps", range(1, 17))
@pytest.mark.default_cases("9")
def test_several_workers_go_on_in_the_same_order(num_steps: int) -> None:
    def build() -> Any:
        return shard_loader(
            DataLoader(Lopsided(32), batch_size=2, num_workers=2, prefetch_factor=1), Shard(0, 1)
        )

    first = build()
    assert samples_of(first, num_steps) + samples_of(resumed(build(), first)) == samples_of(build())


class Lopsided(Stream):
    """Worker 0 has a quarter of the numbers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        quarter = self.length // 4
        return iter(range(quarter) if info.id == 0 else range(quarter, self.length))


class Told(Stream):
    """A stream whose order is that of the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        info = get_worker_info()
        return iter(order if info is None else order[info.id :: info.num_workers])


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.default_cases("2-True")
def test_a_stream_is_told_the_epoch(workers: int, persistent: bool) -> None:
    def build() -> Any:
        loader = DataLoader(Told(20), batch_size=2, num_workers=workers, persistent_workers=persistent)
        return shard_loader(loader, Shard(0, 1))

    loader = build()
    first, second = samples_of(loader), samples_of(loader)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    loader.set_epoch(1)
    assert samples_of(loader, 3) + samples_of(resumed(build(), loader)) == second


def test_a_stream_that_several_workers_read_has_no_length() -> None:
    def build(workers: int) -> Any:
        return shard_loader(DataLoader(Sized(10), batch_size=4, num_workers=workers), Shard(0, 1))

    assert len(build(0)) == len(build(1)) == len(list(build(1))) == 3
    with pytest.raises(TypeError, match="steps of a stream that 2 workers read cannot be counted"):
        len(build(2))


def test_another_length_is_refused() -> None:
    def build(length: int) -> Any:
        return shard_loader(DataLoader(Sized(length), batch_size=4), Shard(0, 1))

    with pytest.raises(ValueError, match="num_positions=10 and this loader has 30"):
        resumed(build(30), build(10))


def test_going_on_is_said_by_one_of_the_ranks_that_read(
    make_shards, read_together, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> DataLoader[int]:
        return DataLoader(Stream(40), batch_size=2)

    part = read_together(make_shards(build, 3), 4)
    rest = read_together(make_shards(build, 3, part.states[-1]))
    assert part.samples + rest.samples == list(range(40))
    assert caplog.messages == ["going on at sample 24 of a stream: Stream is read and dropped up to there"]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, False), (2, True)])
@pytest.mark.default_cases("2-True")
def test_a_pipe_of_torchs_is_shared_out_and_shuffled_alike(workers: int, persistent: bool) -> None:
    def build() -> Any:
        pipe = IterableWrapper(range(20)).shuffle().sharding_filter()
        return shard_loader(
            DataLoader(pipe, batch_size=2, num_workers=workers, persistent_workers=persistent), Shard(0, 1)
        )

    first = build()
    whole, second = samples_of(first), samples_of(first)
    assert sorted(whole) == sorted(second) == list(range(20))
    assert whole != second
    first.set_epoch(0)
    assert samples_of(first, 4) + samples_of(resumed(build(), first)) == whole
