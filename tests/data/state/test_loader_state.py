import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from data.reading import resumed
from drivetrain_data import DataStateError, Shard, shard_loader, trim

reused = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)

# (shards, batch size on each, steps before the interruption)
runs = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5)


class Shuffling(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.shuffle(order)
        return iter(order)


BUILDERS: dict[str, Callable[[int, int], DataLoader[Any]]] = {
    "sequential": lambda n, b: DataLoader(torch.arange(n), batch_size=b),
    "shuffled": lambda n, b: DataLoader(torch.arange(n), batch_size=b, shuffle=True),
    "replacement": lambda n, b: DataLoader(
        torch.arange(n), batch_size=b, sampler=RandomSampler(range(n), replacement=True)
    ),
    "weighted": lambda n, b: DataLoader(
        torch.arange(n), batch_size=b, sampler=WeightedRandomSampler([1.0] * n, n)
    ),
    "custom": lambda n, b: DataLoader(torch.arange(n), batch_size=b, sampler=Shuffling(n)),
}


@pytest.mark.parametrize("kind", BUILDERS)
@reused
@given(
    length=st.integers(1, 120), chain=runs, epoch=st.integers(0, 3), even=st.sampled_from(["uneven", "pad"])
)
@pytest.mark.default_cases("shuffled")
def test_any_chain_of_interruptions_gives_the_epoch_once_in_order(
    make_shards, read_together, read_in_runs, kind, length, chain, epoch, even
) -> None:
    build = BUILDERS[kind]
    (alone,) = make_shards(lambda: build(length, 1), 1, seed=3)
    alone.set_epoch(epoch)
    seeds = itertools.count(3)  # a state brings the seed of the first run
    read = read_in_runs(
        lambda size: build(length, size),
        chain,
        length,
        epoch,
        lambda count: {"even": even, "seed": next(seeds)},
    )
    assert read == read_together([alone]).samples


class Counting(Shuffling):
    """Counts its epochs itself."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        return iter(order)


@pytest.mark.parametrize("kind", [*BUILDERS, "counting"])
@reused
@given(
    length=st.integers(1, 60),
    chain=runs,
    even=st.sampled_from(["uneven", "pad", "drop"]),
    drop_last=st.booleans(),
    hold=st.integers(1, 3),
)
@pytest.mark.default_cases("shuffled")
def test_what_was_stepped_on_comes_once_with_any_tail_and_accumulation(
    make_shards, read_together, kind, length, chain, even, drop_last, hold
) -> None:
    """Every run steps on `hold` batches at a time, and is left with some in hand; what was stepped on is a prefix."""
    make = BUILDERS.get(kind, lambda n, b: DataLoader(torch.arange(n), batch_size=b, sampler=Counting(n)))
    expected = read_together(make_shards(lambda: make(length, 1), 1)).samples

    def build(size: int) -> DataLoader[Any]:
        loader = make(length, size)
        return DataLoader(loader.dataset, batch_size=size, sampler=loader.sampler, drop_last=drop_last)

    dropping = drop_last or even == "drop"
    state: dict[str, Any] | None = None
    read: list[int] = []
    for count, size, num_steps in chain:
        if dropping and count * size > length:
            continue
        shards = make_shards(lambda size=size: build(size), count, state, even=even)
        pending: list[int] = []
        iterators = [iter(shard) for shard in shards]
        for step in range(1, num_steps + 1):
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                assert batches == [None] * count
                break
            plan = shards[0].current
            assert not dropping or set(plan.real_counts) == {size}
            pending += trim(plan, torch.cat(batches)).tolist()
            if step % hold == 0 or plan.is_last:
                for shard in shards:
                    shard.mark_stepped()
                read, pending = read + pending, []
        states = [shard.state_dict(stepped=True) for shard in shards]
        assert states.count(states[0]) == count
        state = states[0]
        assert read == expected[: len(read)]
        assert state["epoch"] or state["position"] == len(read)
        if state["epoch"]:
            assert len(read) == length or dropping
            break


@pytest.mark.parametrize("kind", ["shuffled", "custom"])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.default_cases("1-shuffled")
def test_what_workers_have_read_ahead_comes_again(make_shards, read_together, kind, num_workers) -> None:
    def build(size: int) -> DataLoader[Any]:
        sampler = BUILDERS[kind](23, size).sampler
        workers: dict[str, Any] = {"num_workers": num_workers, "prefetch_factor": 4}
        return DataLoader(torch.arange(23), batch_size=size, sampler=sampler, **workers)

    expected = read_together(make_shards(lambda: BUILDERS[kind](23, 1), 1)).samples
    first = read_together(make_shards(lambda: build(2), 2), 2)
    rest = read_together(make_shards(lambda: build(3), 3, first.states[-1]))
    assert first.samples + rest.samples == expected


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


@reused
@given(length=st.integers(1, 80), chain=runs)
def test_a_stream_goes_on_at_any_number_of_shards(read_in_runs, length, chain) -> None:
    read = read_in_runs(lambda size: DataLoader(Stream(length), batch_size=size), chain, length)
    assert read == list(range(length))


def test_a_state_is_a_handful_of_plain_values() -> None:
    loader = shard_loader(DataLoader(torch.arange(10**6), batch_size=2, shuffle=True), Shard(0, 1))
    next(iter(loader))
    assert loader.state_dict() == {
        "format": 1,
        "epoch": 0,
        "position": 2,
        "seed": 0,
        "identity": {
            "order": "shuffled/1",
            "num_samples": 10**6,
            "num_positions": 10**6,
            "built_from": 10**6,
        },
        "fingerprint": None,
        "extra": {},
    }


class Marked(list[int]):
    """A dataset that knows its content, as Hugging Face datasets do."""

    def __init__(self, mark: str) -> None:
        super().__init__(range(4))
        self._fingerprint = mark


class Named(Sampler[list[int]]):
    """Has its batch size under a name of its own."""

    def __init__(self, length: int, bs: int) -> None:
        self.length = length
        self.bs = bs

    def __len__(self) -> int:
        return self.length // self.bs

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(i, i + self.bs)) for i in range(0, self.length, self.bs)])


class Batches(Sampler[list[int]]):
    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(8))
        random.shuffle(order)
        return iter([[number * self.batch_size + i for i in range(self.batch_size)] for number in order])


def shuffled(n: int) -> DataLoader[Any]:
    return DataLoader(range(n), shuffle=True)


def sampled(n: int, sampler: Any) -> DataLoader[Any]:
    return DataLoader(range(n), sampler=sampler)


def batched(n: int, batch_sampler: Any) -> DataLoader[Any]:
    return DataLoader(range(n), batch_sampler=batch_sampler)


def numbered(n: int, num_samples: int) -> DataLoader[Any]:
    return sampled(n, RandomSampler(range(n), num_samples=num_samples))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (shuffled(8), shuffled(9), "num_samples=8 .* has 9: the dataset changed its length"),
        (shuffled(8), DataLoader(range(8)), "order='shuffled/1' and this loader has 'sequential'"),
        (
            DataLoader(Marked("a")),
            DataLoader(Marked("b")),
            "fingerprint was 'a' and is 'b': its content chan",
        ),
        (
            batched(32, Batches(3)),
            batched(32, Batches(4)),
            "batch_size=3 .* has 4: a batch sampler goes on in",
        ),
        (numbered(20, 16), numbered(17, 16), "num_samples=20 and this loader has 17: the dataset changed"),
        (numbered(20, 16), numbered(20, 15), "num_positions=16 .* has 15: the sampler gives another number"),
        (
            sampled(99, SubsetRandomSampler(range(20))),
            sampled(99, SubsetRandomSampler(range(50, 70))),
            "built_from=.*: the sampler was built from other indices",
        ),
        (
            batched(24, Named(24, 2)),
            batched(30, Named(30, 2)),
            "num_samples=24 .* has 30: the dataset changed",
        ),
        (
            batched(24, Named(24, 2)),
            batched(24, Named(24, 4)),
            "num_batches=12 .* has 6: the batch sampler give",
        ),
        (sampled(12, range(10)), sampled(20, range(10)), "num_samples=12 .* has 20: the dataset changed"),
    ],
)
def test_other_data_and_other_samplers_are_refused_with_what_differs(before, after, says: str) -> None:
    saved = shard_loader(before, Shard(0, 1))
    next(iter(saved))
    with pytest.raises(DataStateError, match=says):
        resumed(shard_loader(after, Shard(0, 1)), saved)


def test_other_batches_of_the_same_number_are_refused_before_one_is_read() -> None:
    def build(batches: list[list[int]]) -> Any:
        return shard_loader(DataLoader(torch.arange(6), batch_sampler=batches), Shard(0, 1))

    saved = build([[0, 1], [2, 3], [4, 5]])
    next(iter(saved))
    for batches in ([[2, 3], [0, 1], [4, 5]], [[0]] * 3):
        with pytest.raises(DataStateError, match="list drew another order of epoch 0"):
            next(iter(resumed(build(batches), saved)))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 4), (4, 2), (3, 3)])
def test_a_batch_sampler_goes_on_in_whole_batches(
    make_shards, read_together, before: int, after: int
) -> None:
    def build() -> DataLoader[int]:
        return DataLoader(torch.arange(24), batch_sampler=Batches(3))

    whole = read_together(make_shards(build, 1)).samples
    part = read_together(make_shards(build, before), 2)
    assert part.samples + read_together(make_shards(build, after, part.states[-1])).samples == whole


def test_a_batch_in_hand_that_was_not_stepped_on_comes_again() -> None:
    def build() -> Any:
        return shard_loader(DataLoader(torch.arange(10), batch_size=2, shuffle=True), Shard(0, 1))

    loader, order = build(), [batch.tolist() for batch in build()]
    for number, batch in enumerate(loader):
        if number == 3:
            break
        assert loader.state_dict(stepped=True)["position"] == 2 * number
        loader.mark_stepped()
        assert loader.state_dict(stepped=True) == loader.state_dict()
        assert batch.tolist() == order[number]
    for state, expected in ((loader.state_dict(), order[4:]), (loader.state_dict(stepped=True), order[3:])):
        again = build()
        again.load_state_dict(state)
        assert again.state_dict(stepped=True) == again.state_dict() == state
        assert [batch.tolist() for batch in again] == expected


def test_an_epoch_that_is_over_is_over_for_both_counters() -> None:
    loader = shard_loader(DataLoader(torch.arange(4)), Shard(0, 1))
    list(loader)
    assert loader.state_dict(stepped=True) == loader.state_dict()
    assert loader.state_dict()["epoch"] == 1


def damaged(**fields: Any) -> dict[str, Any]:
    return {**shard_loader(DataLoader(torch.arange(10)), Shard(0, 1)).state_dict(), **fields}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "this is no loader's state"),
        ("abc", "this is no loader's state"),
        ({}, "this is no loader's state"),
        ({"step": 3}, "this is no loader's state"),
        (damaged(format=-1), "this is no loader's state"),
        (damaged(format=2), "format 2, and this version reads up to 1"),
        (damaged(position=-1), "position=-1, which must be a number of samples, 0 or more"),
        (damaged(position=True), "position=True, which must be"),
        (damaged(position=torch.tensor(4)), r"position=tensor\(4\), which must be"),
        (damaged(position=11), "position=11 in an epoch of 10"),
        (damaged(epoch=None), "epoch=None, which must be a number of epochs"),
        (damaged(seed="x"), "seed='x', which must be an integer"),
        (damaged(identity=None), "identity=None, which must be a mapping"),
        (damaged(extra="x"), "extra='x', which must be a mapping"),
        (damaged(fingerprint=1.5), "fingerprint=1.5, which must be a string"),
        ({"format": 1, "epoch": 0}, "no 'position', which must be"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(state: Any, message: str) -> None:
    loader = shard_loader(DataLoader(torch.arange(10)), Shard(0, 1))
    before = loader.state_dict()
    with pytest.raises(DataStateError, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict() == before
    assert len(list(loader)) == 10
