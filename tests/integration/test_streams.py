"""Streams that know where they stand, read by one rank for all, and those of other libraries."""

import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper
from torchdata.stateful_dataloader import StatefulDataLoader

from drivetrain import Accelerator
from drivetrain_data import Shard, ShardedLoader, shard_loader
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


def test_a_dispatched_stream_goes_on_at_another_number_of_ranks(run_ranks) -> None:
    ((begun, state, _), _) = run_ranks(dispatched, 3, None)
    assert begun == list(range(12))
    for num_processes in (1, 4):
        rest, _, asked = run_ranks(dispatched, 100, state, num_processes=num_processes)[0]
        assert begun + rest == list(range(40))
        assert min(asked) == 4  # the first step of two ranks was 4 samples


def test_a_stream_of_hugging_face_goes_on_from_its_own_state() -> None:
    def build():
        stream = Dataset.from_dict({"x": list(range(50))}).to_iterable_dataset(num_shards=5)
        return shard_loader(DataLoader(stream.shuffle(seed=3, buffer_size=1), batch_size=4), Shard(0, 1))

    whole = [int(x) for batch in build() for x in batch["x"]]
    assert sorted(whole) == list(range(50))
    first = build()
    begun: list[int] = []
    for batch in first:
        begun += batch["x"].tolist()
        if len(begun) == 12:
            break
    state = first.state_dict()
    assert state["extra"]["stands"][0]["received"] == 4
    again = build()
    again.load_state_dict(state)
    assert begun + [int(x) for batch in again for x in batch["x"]] == whole


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


def prepared_nodes() -> list[int]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(nodes())
    return [int(sample) for batch in loader for sample in accelerator.gather_for_metrics(batch)]


def test_nodes_are_read_by_one_rank_for_all(run_ranks) -> None:
    assert run_ranks(prepared_nodes) == [list(range(20))] * 2
