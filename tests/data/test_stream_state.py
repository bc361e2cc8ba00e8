"""Streams that know where they stand go on from there; what they draw goes on too."""

import pickle
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, IterableDataset

from drivetrain_data import Shard, shard_loader
from drivetrain_data.stream_state import ResumedStream, Snapshots, Stand
from stateful_stream import Standing


def read(loader, num_steps: int | None = None) -> list[list[float]]:
    steps: list[list[float]] = []
    for batch in loader:
        steps += batch.tolist()
        if num_steps is not None and len(steps) >= num_steps * loader.batch_size:
            break
    return steps


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_stream_goes_on_from_its_own_state_with_the_same_draws(num_workers: int) -> None:
    def build(stream: Standing):
        return shard_loader(DataLoader(stream, batch_size=3, num_workers=num_workers), Shard(0, 1), seed=5)

    whole = read(build(Standing(40)))
    first = build(Standing(40))
    begun = read(first, 6)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    assert {stand["received"] for stand in state["extra"]["stands"]} == {
        3
    }  # of the first step; half a second holds
    stream = Standing(40)
    again = build(stream)
    again.load_state_dict(state)
    assert begun + read(again) == whole
    if num_workers == 0:
        assert min(stream.asked) == 3
    assert len(read(again)) == 40


def test_the_next_epoch_begins_at_the_beginning() -> None:
    first = shard_loader(DataLoader(Standing(10), batch_size=2), Shard(0, 1))
    read(first, 2)
    again = shard_loader(DataLoader(Standing(10), batch_size=2), Shard(0, 1))
    again.load_state_dict(first.state_dict())
    assert [index for index, _ in read(again)] == [4, 5, 6, 7, 8, 9]
    assert [index for index, _ in read(again)] == list(range(10))


def test_going_on_says_from_where_samples_are_read_again(caplog) -> None:
    first = shard_loader(DataLoader(Standing(10), batch_size=2), Shard(0, 1))
    read(first, 3)
    again = shard_loader(DataLoader(Standing(10), batch_size=2), Shard(0, 1))
    again.load_state_dict(first.state_dict())
    next(iter(again))
    assert "Standing is read and dropped from sample 2 on, where its own state ends" in caplog.text


def test_a_dataset_without_a_state_gives_none() -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert Snapshots(Plain()).take() is None
    assert Snapshots(Standing(3)).take() is not None


def test_a_resumed_stream_reads_on_from_its_stand() -> None:
    stream = Standing(10)
    snapshot = {"reader": {"number": 4}, "generators": Snapshots(stream).take()["generators"]}
    resumed = ResumedStream(stream, (6,), (Stand(4, snapshot),))
    assert [int(sample[0]) for sample in resumed] == [6, 7, 8, 9]
    assert stream.asked == [4, 5, 6, 7, 8, 9]
