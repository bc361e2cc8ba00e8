"""Streams that know where they stand, read by one rank for all, and those of other libraries."""

import json
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper
from torchdata.stateful_dataloader import StatefulDataLoader

from drivetrain import Accelerator
from drivetrain_data import Shard, ShardedLoader, shard_loader, trim
from stateful_stream import Standing


def dispatched(num_steps: int, state: dict[str, Any] | None) -> tuple[list[float], dict[str, Any], list[int]]:
    accelerator = Accelerator(cpu=True, seed=0)
    stream = Standing(40)
    loader = accelerator.prepare(DataLoader(stream, batch_size=2))
    if state is not None:
        loader.load_state_dict(state)
    found: list[float] = []
    for number, batch in enumerate(loader, start=1):
        found += accelerator.gather_for_metrics(batch)[:, 0].tolist()
        if number == num_steps:
            break
    return found, loader.state_dict(), stream.asked


@pytest.mark.slow
def test_a_dispatched_stream_goes_on_at_another_number_of_ranks(run_ranks) -> None:
    ((begun, state, _), _) = run_ranks(dispatched, 3, None)
    assert begun == list(range(12))
    for num_processes in (1, 4):
        rest, _, asked = run_ranks(dispatched, 100, state, num_processes=num_processes)[0]
        assert begun + rest == list(range(40))
        assert min(asked) == 4  # the first step of two ranks was 4 samples


def hugging_face(*, num_workers: int = 0, seed: int | None = 3, buffer_size: int = 0) -> DataLoader[Any]:
    """Fifty numbers in five files; in order, or shuffled."""
    stream = Dataset.from_dict({"x": list(range(50))}).to_iterable_dataset(num_shards=5)
    if buffer_size:
        stream = stream.shuffle(seed=seed, buffer_size=buffer_size)
    return DataLoader(stream, batch_size=4, num_workers=num_workers)


def numbers(loader: Any, num_steps: int | None = None) -> list[int]:
    return [int(x) for batch in islice(loader, num_steps) for x in batch["x"]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("buffer_size", [0, 1, 10])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.default_cases("1-10-0")
def test_a_stream_of_hugging_face_goes_on_and_begins_anew(
    num_workers: int, buffer_size: int, epoch: int, caplog
) -> None:
    def build() -> ShardedLoader[Any]:
        return shard_loader(hugging_face(num_workers=num_workers, buffer_size=buffer_size), Shard(0, 1))

    first = build()
    epochs = [numbers(first) for _ in range(3)]
    assert [sorted(one) for one in epochs] == [list(range(50))] * 3
    assert not buffer_size or epochs[0] != epochs[1]
    first = build()  # which takes a state at once
    first.set_epoch(epoch)
    begun = numbers(first, 5)
    state = json.loads(json.dumps(first.state_dict()))
    assert ("stands" in state["extra"]) == (buffer_size == 0 or (buffer_size == 1 and num_workers == 0))
    again = build()
    again.load_state_dict(state)
    assert begun + numbers(again) == epochs[epoch]
    assert numbers(again) == epochs[epoch + 1]
    again.set_epoch(epoch)
    assert numbers(again) == epochs[epoch]
    said = "read and dropped up to there, since its own state leaves out its shuffle buffer of 10 samples"
    assert (said in caplog.text) == (buffer_size == 10)
    said = "leaves out which of its sources are read by which of 2 workers"
    assert (said in caplog.text) == (buffer_size == 1 and num_workers == 2)


def test_a_stream_of_hugging_face_that_is_shuffled_without_a_seed_is_not_gone_on_with() -> None:
    first = shard_loader(hugging_face(seed=None, buffer_size=10), Shard(0, 1))
    begun = numbers(first, 3)
    state = first.state_dict()
    again = shard_loader(hugging_face(seed=None, buffer_size=10), Shard(0, 1))
    again.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"give its shuffle\(\) the same seed= and buffer_size= in every run"
    ):
        numbers(again)
    first.load_state_dict(state)  # the very one goes on
    assert sorted(begun + numbers(first)) == list(range(50))


def dispatched_from_hugging_face(
    num_steps: int | None, state: dict[str, Any] | None, buffer_size: int, num_workers: int
) -> tuple[list[int], dict[str, Any]]:
    accelerator = Accelerator(cpu=True, seed=0)
    loader = accelerator.prepare(hugging_face(num_workers=num_workers, buffer_size=buffer_size))
    if state is not None:
        loader.load_state_dict(state)
    found = [
        int(x) for batch in islice(loader, num_steps) for x in accelerator.gather_for_metrics(batch["x"])
    ]
    return found, loader.state_dict()


@pytest.mark.parametrize(("buffer_size", "num_workers"), [(0, 0), (10, 0), (10, 2)])
@pytest.mark.slow
def test_a_dispatched_stream_of_hugging_face_goes_on_at_another_number_of_ranks(
    run_ranks, buffer_size: int, num_workers: int
) -> None:
    (begun, state), _ = run_ranks(dispatched_from_hugging_face, 3, None, buffer_size, num_workers)
    assert len(begun) == 24
    ((rest, _),) = run_ranks(
        dispatched_from_hugging_face, None, state, buffer_size, num_workers, num_processes=1
    )
    assert sorted(begun + rest) == list(range(50))


def test_a_stream_that_divides_itself_is_refused_where_it_would_be_divided_again() -> None:
    stream = Dataset.from_dict({"x": list(range(50))}).to_iterable_dataset(num_shards=4)
    part = split_dataset_by_node(stream, rank=1, world_size=2)
    with pytest.raises(ValueError, match=r"IterableDataset divides the data itself \(rank 1 of 2\)"):
        shard_loader(DataLoader(part, batch_size=4), Shard(1, 2))
    assert len(numbers(shard_loader(DataLoader(part, batch_size=4), Shard(0, 1)))) == 25


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [StatefulDataLoader, DataLoader])
def test_a_stream_that_divides_itself_is_not_dispatched(kind: type[DataLoader[Any]]) -> None:
    accelerator = Accelerator(cpu=True)
    stream = Dataset.from_dict({"x": list(range(50))}).to_iterable_dataset(num_shards=4)
    part = split_dataset_by_node(stream, rank=accelerator.process_index, world_size=2)
    with pytest.raises(ValueError, match="pass the undivided one, without split_dataset_by_node"):
        accelerator.prepare(kind(part, batch_size=4))


# torchdata 0.11 calls what torch 2.15 deprecates.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_stateful_loader_is_sharded_and_resumed_as_torchs() -> None:
    def build(rank: int, count: int) -> ShardedLoader[Any]:
        loader = StatefulDataLoader(torch.arange(20), batch_size=2, shuffle=True)
        return shard_loader(loader, Shard(rank, count), seed=4)

    whole = [int(sample) for batch in build(0, 1) for sample in batch]
    assert sorted(whole) == list(range(20))
    shards = [build(rank, 2) for rank in range(2)]
    begun = [
        int(sample) for step in zip(*(next(iter(shard)) for shard in shards), strict=True) for sample in step
    ]
    assert sorted(begun) == sorted(whole[:4])
    again = build(0, 1)
    again.load_state_dict(shards[0].state_dict())
    assert [int(sample) for batch in again for sample in batch] == whole[4:]


def nodes() -> Loader[Any]:
    """torchdata's nodes: batches of two of twenty numbers, mapped."""
    numbers = Mapper(IterableWrapper(range(20)), lambda number: torch.tensor(number))
    return Loader(Mapper(Batcher(numbers, batch_size=2, drop_last=False), torch.stack))


def stateful() -> StatefulDataLoader[Any]:
    """torchdata's loader over a stream."""
    return StatefulDataLoader(Standing(20), batch_size=2)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("build", [nodes, stateful])
def test_a_loader_of_torchdata_goes_on_from_its_own_state(build: Callable[[], Any], caplog) -> None:
    def samples(loader: ShardedLoader[Any], num_steps: int | None = None) -> list[int]:
        found: list[int] = []
        for batch in islice(loader, num_steps):
            found += (batch[:, 0] if batch.dim() > 1 else batch).int().tolist()
        return found

    first = shard_loader(build(), Shard(0, 1))
    begun = samples(first, 4)
    assert begun == list(range(8))
    state = pickle.loads(pickle.dumps(first.state_dict()))
    assert state["extra"]["stand"]["received"] == 1
    again = shard_loader(build(), Shard(0, 1))
    again.load_state_dict(state)
    assert begun + samples(again) == list(range(20))
    assert "it is read and dropped from batch 1 on, where its own state ends" in caplog.text
    assert samples(again) == list(range(20))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("buffer_size", [1, 10])
def test_a_loader_of_torchdata_over_a_shuffled_stream_goes_on(buffer_size: int) -> None:
    def build() -> ShardedLoader[Any]:
        stream = hugging_face(buffer_size=buffer_size).dataset
        return shard_loader(StatefulDataLoader(stream, batch_size=4), Shard(0, 1))

    first = build()
    epochs = [numbers(first), numbers(first)]
    assert [sorted(one) for one in epochs] == [list(range(50))] * 2
    assert epochs[0] != epochs[1]
    first = build()
    begun = numbers(first, 5)
    again = build()
    again.load_state_dict(first.state_dict())
    assert begun + numbers(again) == epochs[0]
    assert numbers(again) == epochs[1]


@pytest.mark.ranks(2)
def test_nodes_are_read_by_one_rank_for_all() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(nodes())
    found = [int(sample) for batch in loader for sample in accelerator.gather_for_metrics(batch)]
    assert found == list(range(20))


class Shuffling(IterableDataset[torch.Tensor]):
    """A stream in an order of its own, drawn from one of the global generators."""

    def __init__(self, draw: Callable[[list[int]], None]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(19))
        self.draw(order)
        return iter(torch.tensor(order))


# torchdata 0.11 calls what torch 2.15 deprecates.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("draw", [random.shuffle, np.random.shuffle])
@pytest.mark.parametrize("count", [1, 2])
def test_what_a_loader_of_torchdata_draws_is_the_same_on_every_rank_and_after_a_resume(
    draw: Callable[[list[int]], None], count: int
) -> None:
    def make(shards: int) -> list[ShardedLoader[Any]]:
        return [
            shard_loader(StatefulDataLoader(Shuffling(draw), batch_size=2), Shard(index, shards))
            for index in range(shards)
        ]

    def stepped(shards: list[ShardedLoader[Any]], num_steps: int | None = None) -> list[int]:
        found: list[int] = []
        for batches in islice(zip(*shards, strict=True), num_steps):
            found += trim(shards[0].current, torch.cat(batches)).tolist()
        return found

    random.seed(count)
    np.random.seed(count)
    whole = stepped(make(count))
    assert sorted(whole) == list(range(19)) != whole
    begun = make(count)
    first = stepped(begun, 2)
    resumed = make(2)
    for shard in resumed:
        shard.load_state_dict(begun[0].state_dict())
    assert first + stepped(resumed) == whole
    assert stepped(resumed) != whole  # the next epoch


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_what_torchdata_shuffles_has_an_order_of_ours() -> None:
    def make(loader: type[DataLoader[Any]]) -> ShardedLoader[Any]:
        return shard_loader(loader(torch.arange(20), batch_size=3, shuffle=True), Shard(0, 1), seed=5)  # pyright: ignore[reportArgumentType]

    theirs, plain = make(StatefulDataLoader), make(DataLoader)
    assert theirs.order_source == plain.order_source
    assert [batch.tolist() for batch in theirs] == [batch.tolist() for batch in plain]
