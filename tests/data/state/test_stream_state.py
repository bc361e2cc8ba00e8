"""Streams that know where they stand go on from there; what they draw goes on too."""

import json
import pickle
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from data.reading import resumed
from drivetrain_data import Shard, shard_loader, skip_first_batches
from drivetrain_data.state.stream_state import (
    EpochReader,
    EpochStream,
    PositionedSnapshot,
    ReadPosition,
    Snapshotter,
)
from stateful_stream import Standing


def read(loader, num_steps: int | None = None) -> list[list[float]]:
    return [sample for batch in islice(loader, num_steps) for sample in batch.tolist()]


def numbers(loader, num_steps: int | None = None) -> list[int]:
    return [int(number) for number, _ in read(loader, num_steps)]


def pairs(length: int = 10):
    return shard_loader(DataLoader(Standing(length), batch_size=2), Shard(0, 1))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.slow
def test_a_stream_goes_on_from_its_own_state_with_the_same_draws(num_workers: int) -> None:
    def build(stream: Standing):
        return shard_loader(DataLoader(stream, batch_size=3, num_workers=num_workers), Shard(0, 1), seed=5)

    whole = read(build(Standing(40)))
    first = build(Standing(40))
    begun = read(first, 6)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    # Of the first step; half a second holds.
    assert {stand["received"] for stand in state["extra"]["stands"]} == {3}
    stream = Standing(40)
    again = build(stream)
    again.load_state_dict(state)
    assert begun + read(again) == whole
    if num_workers == 0:
        assert min(stream.asked) == 3
    assert len(read(again)) == 40


def test_the_next_epoch_begins_at_the_beginning() -> None:
    first = pairs()
    read(first, 2)
    again = resumed(pairs(), first)
    assert numbers(again) == [4, 5, 6, 7, 8, 9]
    assert numbers(again) == list(range(10))


def test_going_on_says_from_where_samples_are_read_again(caplog) -> None:
    first = pairs()
    read(first, 3)
    next(iter(resumed(pairs(), first)))
    assert "Standing is read and dropped from sample 2 on, where its own state ends" in caplog.text


def test_a_dataset_without_a_state_gives_none() -> None:
    assert Snapshotter(IterableWrapper(range(3))).take() is None
    assert Snapshotter(Standing(3)).take() is not None


def test_a_stream_is_begun_at_its_snapshot() -> None:
    stream = Standing(10)
    reader = EpochReader(stream, num_workers=0, stride=1, persistent=False, trusted=True)
    snapshot = {"reader": {"number": 4}, "generators": Snapshotter(stream).take()["generators"]}
    reader.begin(0, 0, ReadPosition(0, [6], [PositionedSnapshot(4, snapshot)]))
    assert [int(sample[0]) for sample in EpochStream(reader)] == [6, 7, 8, 9]
    assert stream.asked == [4, 5, 6, 7, 8, 9]
    reader.begin(0, 1)
    assert [int(sample[0]) for sample in EpochStream(reader)] == list(range(10))


class Starting(Standing):
    """A stream that keeps the place where it was once told to start, in every epoch."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.first = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.number = self.first
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["number"]


@pytest.mark.parametrize("kind", [Standing, Starting])
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.slow
def test_every_epoch_begins_at_the_beginning(kind, num_workers: int, persistent: bool) -> None:
    def build():
        loader = DataLoader(kind(20), batch_size=2, num_workers=num_workers, persistent_workers=persistent)
        return shard_loader(loader, Shard(0, 1))

    left = build()
    numbers(left, 3)  # left by break
    assert sorted(numbers(left)) == list(range(20))
    numbers(left, 3)
    left.set_epoch(2)
    assert sorted(numbers(left)) == list(range(20))

    first = build()
    begun = numbers(first, 3)
    again = resumed(build(), first)
    assert sorted(begun + numbers(again)) == list(range(20))
    assert sorted(numbers(again)) == list(range(20))
    again.load_state_dict(first.state_dict())
    numbers(again, 1)  # the rest left by break, too
    assert sorted(numbers(again)) == list(range(20))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("through", ["json", "torch.load"])
@pytest.mark.default_cases("json-2")
def test_a_state_is_made_of_plain_values(tmp_path, num_workers: int, through: str) -> None:
    def build():
        return shard_loader(DataLoader(Standing(20), batch_size=2, num_workers=num_workers), Shard(0, 1))

    whole = read(build())
    first = build()
    begun = read(first, 3)
    state = first.state_dict()
    assert "generators" in state["extra"]["stands"][0]["snapshot"]
    if through == "json":
        state = json.loads(json.dumps(state))
    else:
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = build()
    again.load_state_dict(state)
    assert begun + read(again) == whole


def test_batches_skipped_in_a_later_epoch_are_found_without_the_states_of_an_earlier_one() -> None:
    loader = pairs(20)
    read(loader)
    assert numbers(skip_first_batches(loader, 3)) == list(range(6, 20))
    loader.set_epoch(1)
    assert numbers(skip_first_batches(loader, 0)) == list(range(20))


def test_a_state_that_cannot_be_asked_for_is_refused() -> None:
    class Asking(Standing):
        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
            return {"number": num_samples}

    with pytest.raises(TypeError, match=r"Asking\.state_dict asks for num_samples, from_beginning"):
        shard_loader(DataLoader(Asking(20)), Shard(0, 1))
