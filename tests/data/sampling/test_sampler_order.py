"""Samplers of users: generators seeded, draws remembered, and what cannot come again refused."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from data.reading import resumed, samples_of
from drivetrain_data import (
    DataStateError,
    IndexRangeError,
    Shard,
    ShardedLoader,
    shard_loader,
    skip_first_batches,
)
from drivetrain_data.sampling.sampler_order import DrawnOrder
from drivetrain_data.state.sampler_parts import copy_of

LENGTH = 20


class Counting(Sampler[int]):
    """Counts its epochs itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        return iter(order)


class Reshuffling(Counting):
    """Shuffles what the epoch before left."""

    def __init__(self) -> None:
        self.order = list(range(LENGTH))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(list(self.order))


class InDict(Counting):
    def __init__(self) -> None:
        self.held = {"generator": torch.Generator(), "others": [np.random.default_rng()]}

    def __iter__(self) -> Iterator[int]:
        first = torch.randperm(LENGTH, generator=self.held["generator"])
        return iter(first[self.held["others"][0].permutation(LENGTH)].tolist())


class Inside(Counting):
    def __init__(self) -> None:
        self.inner = RandomSampler(range(LENGTH), generator=torch.Generator())

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


class Slotted:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = random.Random()

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.sample(range(LENGTH), LENGTH))


class SetsAndDraws(Counting):
    """Draws when it is told the epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.order = list(range(LENGTH))

    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(LENGTH, generator=self.generator).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class Curriculum(Counting):
    """Turns its order by one more each epoch, and saves how often it was read."""

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = list(range(LENGTH))
        random.shuffle(order)
        return iter([*order[self.epoch :], *order[: self.epoch]])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Entropy(Counting):
    """Draws from what nobody can seed."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(LENGTH).tolist())


class Pairs(Sampler[list[int]]):
    def __init__(self, sampler: Any) -> None:
        self.inside = sampler
        for name in ("set_epoch", "state_dict", "load_state_dict"):
            if hasattr(sampler, name):
                setattr(self, name, getattr(sampler, name))

    def __len__(self) -> int:
        return LENGTH // 2

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.inside)
        return iter([order[i : i + 2] for i in range(0, LENGTH, 2)])


def build(make: Callable[[], Any], *, batches: bool, length: int = LENGTH) -> Any:
    arguments = {"batch_sampler": Pairs(make())} if batches else {"sampler": make(), "batch_size": 2}
    return shard_loader(DataLoader(torch.arange(length), **arguments), Shard(0, 1))


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("make", [Counting, Reshuffling, InDict, Inside, Slotted, SetsAndDraws, Curriculum])
@pytest.mark.parametrize("epoch", [0, 1, 3])
@pytest.mark.default_cases("1", "3-SetsAndDraws-True")
def test_a_sampler_goes_on_in_its_order_in_a_fresh_process(make, batches: bool, epoch: int) -> None:
    whole = build(make, batches=batches)
    epochs = [samples_of(whole, 10 if number < epoch else None) for number in range(epoch + 2)]
    assert all(sorted(one) == list(range(LENGTH)) for one in epochs)
    assert len({str(one) for one in epochs}) == len(epochs)
    for stop in (0, 3, 10):
        first = build(make, batches=batches)
        for number in range(epoch):
            assert samples_of(first) == epochs[number]
        if stop:
            samples_of(first, stop)
        state = first.state_dict()
        fresh = resumed(build(make, batches=batches), first)
        assert fresh.state_dict() == state
        assert samples_of(fresh) == epochs[epoch][2 * stop :]
        later = resumed(build(make, batches=batches), fresh)
        assert samples_of(fresh) == samples_of(later) == epochs[epoch + 1]
        # In the process that has read on, too.
        fresh.load_state_dict(state)
        assert samples_of(fresh) == epochs[epoch][2 * stop :]


@pytest.mark.parametrize("batches", [False, True])
def test_an_order_that_does_not_come_again_is_refused(batches: bool) -> None:
    first = build(Entropy, batches=batches)
    samples_of(first, 3)
    with pytest.raises(DataStateError, match=r"drew another order of epoch 0 than in the run that was saved"):
        next(iter(resumed(build(Entropy, batches=batches), first)))


def test_the_plan_says_that_epochs_are_drawn_again() -> None:
    loader = build(Counting, batches=False)
    list(loader)
    assert "drawn on every rank after all epochs before it, since reading changes it" in loader.order_source
    assert loader.state_dict()["extra"] == {"read": [[0, 1]]}
    pure = build(Inside, batches=False)
    list(pure)
    assert "after all epochs" not in pure.order_source
    assert pure.state_dict()["extra"] == {}


def test_a_sampler_is_not_drawn_before_it_is_read() -> None:
    sampler = Counting()
    loader = shard_loader(DataLoader(range(LENGTH), sampler=sampler, batch_size=2), Shard(0, 2), even="drop")
    assert len(loader) == 5
    loader.state_dict()
    assert sampler.epoch == 0


def test_generators_of_the_program_are_left_alone() -> None:
    class Global(Counting):
        def __init__(self) -> None:
            self.generator = torch.default_generator

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(LENGTH, generator=self.generator).tolist())

    before = torch.get_rng_state()
    loader = build(Global, batches=False)
    assert samples_of(loader) != samples_of(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_two_generators_of_a_sampler_draw_apart() -> None:
    class Two(Counting):
        def __init__(self) -> None:
            self.inner = [RandomSampler(range(10), generator=torch.Generator()) for _ in range(2)]

        def __iter__(self) -> Iterator[int]:
            return iter([*self.inner[0], *(10 + index for index in self.inner[1])])

    drawn = samples_of(build(Two, batches=False))
    assert [index + 10 for index in drawn[:10]] != drawn[10:]


class Shrinking(Counting):
    """Gives a sample fewer each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH - self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


def test_a_length_that_depends_on_the_epoch_is_that_of_the_epoch() -> None:
    def make() -> Any:
        return shard_loader(DataLoader(range(LENGTH), sampler=Shrinking(), batch_size=1), Shard(0, 1))

    loader = make()
    assert len(loader) == 20
    loader.set_epoch(3)
    assert len(loader) == 17
    assert len(samples_of(loader, 5)) == 5
    again = resumed(make(), loader)
    assert samples_of(again) == list(range(5, 17))
    assert samples_of(again) == list(range(16))


def test_other_weights_are_refused_and_the_same_are_not() -> None:
    def make(weights: list[float]) -> Any:
        return build(lambda: WeightedRandomSampler(weights, LENGTH), batches=False)

    first = make([1.0] * 20)
    samples_of(first, 3)
    resumed(make([1.0] * 20), first)
    with pytest.raises(DataStateError, match="built from other indices, weights or lengths"):
        resumed(make([2.0] * 19 + [1.0]), first)


class Placed:
    """Batches of one, of which the sampler itself keeps the place."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[list[int]]:
        while self.place < 100:
            self.place += 1
            yield [self.place - 1]
        self.place = 0


class StatefulPlaced(Placed):
    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("kind", [Placed, StatefulPlaced])
def test_a_batch_sampler_that_keeps_its_place_begins_anew_after_a_loop_that_was_left(
    kind: type[Placed],
) -> None:
    def make() -> ShardedLoader[torch.Tensor]:
        return shard_loader(DataLoader(torch.arange(100), batch_sampler=kind()), Shard(0, 1))  # pyright: ignore[reportArgumentType]

    loader = make()
    samples_of(loader, 4)
    assert samples_of(loader, 10) == list(range(10))
    assert samples_of(resumed(make(), loader)) == list(range(10, 100))


class Told(Shrinking):
    """Batches of one in an order of the epoch that it is told, looked at as late as possible."""

    def __len__(self) -> int:
        return 200

    def __iter__(self) -> Iterator[Any]:
        for number in range(200):
            yield [(number + 50 * self.epoch) % 200]


def test_lengths_that_are_asked_for_in_a_loop_leave_its_order_as_it_is() -> None:
    loader = shard_loader(DataLoader(torch.arange(200), batch_sampler=Told()), Shard(0, 1))  # pyright: ignore[reportArgumentType]
    rest = skip_first_batches(loader, 5)
    read: list[int] = []
    for batch in rest:
        read.append(int(batch))
        assert len(rest) == 195
        assert loader.num_left() == len(loader) == 200
    assert read == list(range(5, 200))


class LongInPlace(Sampler[int]):
    """Shuffles its own long list, again and again, and holds data in another."""

    def __init__(self) -> None:
        self.order = list(range(2000))
        self.data = [torch.zeros(1) for _ in range(2000)]

    def __len__(self) -> int:
        return 2000

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


def test_a_long_order_that_is_shuffled_in_place_comes_again_and_data_is_not_copied() -> None:
    def make() -> ShardedLoader[torch.Tensor]:
        return shard_loader(DataLoader(torch.arange(2000), batch_size=50, sampler=LongInPlace()), Shard(0, 1))  # pyright: ignore[reportArgumentType]

    loader = make()
    samples_of(loader)
    begun = samples_of(loader, 3)
    assert sorted(begun + samples_of(resumed(make(), loader))) == list(range(2000))
    sampler = LongInPlace()
    copy = copy_of(sampler)
    assert copy is not None
    assert len(copy.content) < 20_000
    data, order = sampler.data, list(sampler.order)
    sampler.order.reverse()
    copy.restore()
    assert sampler.data is data
    assert sampler.order == order


def test_a_drawn_order_is_named_after_its_sampler_and_hands_keys_on() -> None:
    order = DrawnOrder(["b", "a"], seed=0, size=None)
    assert order.name == "drawn:list"
    assert order.take(0, np.arange(order.length(0))) == ["b", "a"]
    with pytest.raises(IndexRangeError, match="gave index 2"):
        DrawnOrder([2], seed=0, size=2).take(0, np.arange(1))
