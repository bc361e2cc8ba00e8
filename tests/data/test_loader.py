from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from data.reading import resumed
from data.reading import samples_of as samples
from drivetrain_data import (
    LoaderTracker,
    ResumedLoaderError,
    Shard,
    ShardedLoader,
    shard_loader,
    skip_first_batches,
)
from stateful_stream import Standing


def sharded(
    length: int = 20, *, batch_size: int = 4, shuffle: bool = True, **options: Any
) -> ShardedLoader[Any]:
    return shard_loader(
        DataLoader(torch.arange(length), batch_size=batch_size, shuffle=shuffle), Shard(0, 1), **options
    )


def test_each_loop_is_the_next_epoch() -> None:
    loader = sharded()
    assert loader.epoch == 0
    first = samples(loader)
    assert loader.epoch == 0
    second = samples(loader)
    assert loader.epoch == 1
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))


def test_set_epoch_chooses_the_order() -> None:
    loader = sharded()
    epochs = []
    for epoch in (3, 0, 3):
        loader.set_epoch(epoch)
        assert loader.epoch == epoch
        epochs.append(samples(loader))
    assert epochs[0] == epochs[2] != epochs[1]
    with pytest.raises(ValueError, match="epoch=-1: must be an integer of at least 0"):
        loader.set_epoch(-1)


def test_a_loop_that_is_left_is_over() -> None:
    loader, whole = sharded(), sharded()
    expected = [samples(whole), samples(whole)]
    assert samples(loader, 1) == expected[0][:4]
    assert loader.current is None
    assert samples(loader) == expected[1]
    assert loader.epoch == 1


def test_a_position_is_what_was_received_in_the_loop() -> None:
    loader = sharded()
    whole = samples(sharded())
    samples(loader, 3)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 12)
    other = resumed(sharded(batch_size=3), loader)
    assert other.epoch == 0
    assert samples(other) == whole[12:]
    assert other.epoch == 0
    assert len(samples(other)) == 20
    assert other.epoch == 1


def test_a_rest_is_kept_by_set_epoch_of_the_same_epoch_and_dropped_by_another() -> None:
    loader = sharded()
    next(iter(loader))
    for epoch, left in ((0, 16), (1, 20)):
        other = resumed(sharded(), loader)
        other.set_epoch(epoch)
        assert len(samples(other)) == left


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    loader = sharded()
    last = [loader.state_dict() for _ in loader][-1]
    assert (last["epoch"], last["position"]) == (0, 20)
    after = loader.state_dict()
    assert (after["epoch"], after["position"]) == (1, 0)
    for state, left in ((last, 0), (after, 20)):
        other = sharded()
        other.load_state_dict(state)
        assert len(samples(other)) == left


def test_a_seed_is_taken_from_the_state() -> None:
    loader, whole = sharded(seed=7), samples(sharded(seed=7))
    next(iter(loader))
    other = resumed(sharded(seed=8), loader)
    assert samples(other) == whole[4:]
    assert "seed 7" in other.order_source


def test_the_first_batches_are_skipped_once() -> None:
    loader = sharded()
    whole = samples(sharded())
    rest = skip_first_batches(loader, 2)
    assert len(rest) == 3
    assert rest.dataset is loader.dataset
    iterator = iter(rest)
    assert next(iterator).tolist() == whole[8:12]
    assert loader.state_dict()["position"] == 12
    assert samples(iterator) == whole[12:]
    assert len(samples(loader)) == 20


def test_skipping_is_for_sharded_loaders() -> None:
    with pytest.raises(TypeError, match="takes what prepare or shard_loader returned, not DataLoader"):
        skip_first_batches(DataLoader(torch.arange(3)), 1)
    with pytest.raises(ValueError, match="num_batches=-1"):
        skip_first_batches(sharded(), -1)


def test_two_loops_at_once_are_refused() -> None:
    loader = sharded()
    outer = iter(loader)
    next(outer)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="another loop over this ShardedLoader has begun"):
        next(outer)


def test_loops_that_may_interleave_go_on_from_where_each_stands() -> None:
    expected = sharded()
    first, second = list(map(list, expected)), list(map(list, expected))
    loader = sharded()
    loader.may_interleave = True
    outer = iter(loader)
    read = [list(next(outer))]
    inner = iter(loader)
    assert list(next(inner)) == second[0]
    read.append(list(next(outer)))
    assert (loader.epoch, loader.state_dict()["position"]) == (0, 8)
    assert list(next(inner)) == second[1]
    inner.close()
    assert [*read, *map(list, outer)] == first
    assert loader.state_dict()["epoch"] == 1
    assert list(map(list, loader)) == second


def test_each_of_two_loops_remembers_the_batches_that_were_stepped_on() -> None:
    loader = sharded()
    loader.may_interleave = True
    outer = iter(loader)
    next(outer)
    loader.mark_stepped()
    stepped = loader.position
    next(iter(loader))  # another loop begins, without a step
    next(outer)
    state = loader.state_dict(stepped=True)
    assert (state["epoch"], state["position"], state["repeats"]) == (0, stepped, loader.position - stepped)


def test_every_batch_is_told() -> None:
    told: list[int] = []
    activity = LoaderTracker()
    loader = sharded(on_batch=lambda: told.append(1), activity=activity)
    for _ in loader:
        assert activity.current is loader
    assert len(told) == 5
    assert activity.current is None


class Draws(Dataset[torch.Tensor]):
    """Each sample is a draw of the worker that reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is not None
        return torch.rand(())


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("batch_size", [1, None])
@pytest.mark.default_cases("1-True")
def test_workers_are_seeded_by_seed_epoch_and_shard_and_not_by_the_number_of_shards(
    persistent: bool, batch_size: int | None
) -> None:
    def build(count: int, index: int = 0, seed: int = 1) -> ShardedLoader[Any]:
        loader = DataLoader(Draws(), batch_size=batch_size, num_workers=1, persistent_workers=persistent)
        return shard_loader(loader, Shard(index, count), seed=seed)

    def draws(loader: ShardedLoader[Any]) -> list[float]:
        before = torch.get_rng_state()
        values = [batch.item() for batch in loader]
        assert torch.equal(before, torch.get_rng_state())
        return values

    loader = build(1)
    alone, second, third = draws(loader), draws(loader), draws(loader)
    assert draws(build(2)) == alone[::2]  # by the position of the step
    assert draws(build(2, index=1)) != alone[::2]
    assert draws(build(1, seed=2)) != alone
    assert alone != second
    anew = build(1)
    anew.set_epoch(2)
    assert draws(anew) == third
    anew.set_epoch(0)
    next(iter(anew))  # left by break, while the worker reads on
    anew.set_epoch(1)
    assert draws(anew) == second
    anew.set_epoch(1)
    assert draws(anew) == second


def begin_at_a_hundred(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.first = 100


class Batched(Dataset[int]):
    """It reads whole batches at a time."""

    first = 0

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.first + index for index in indices]


def test_a_dataset_reads_batches_and_is_set_up_in_workers_that_live_on() -> None:
    loader = DataLoader(
        Batched(), batch_size=2, num_workers=1, persistent_workers=True, worker_init_fn=begin_at_a_hundred
    )
    sharded_loader = shard_loader(loader, Shard(0, 1))
    assert samples(sharded_loader) == samples(sharded_loader) == [100, 101, 102, 103]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.default_cases("True")
def test_what_workers_read_ahead_does_not_count(persistent: bool) -> None:
    def build() -> ShardedLoader[Any]:
        workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent, "prefetch_factor": 4}
        loader = DataLoader(torch.arange(40), batch_size=2, shuffle=True, **workers)
        return shard_loader(loader, Shard(0, 1))

    loader, plain = build(), sharded(40)
    first, second = samples(plain), samples(plain)
    samples(loader, 3)
    state = loader.state_dict()
    assert state["position"] == 6
    assert samples(loader) == second
    other = build()
    other.load_state_dict(state)
    assert samples(other) == first[6:]


class Stepping:
    """A sampler that is told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch % 3, (self.epoch + 1) % 3, (self.epoch + 2) % 3])


def test_a_sampler_is_told_the_epoch() -> None:
    loader = shard_loader(DataLoader(range(3), sampler=Stepping()), Shard(0, 1))  # pyright: ignore[reportArgumentType]
    assert [samples(loader) for _ in range(3)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_a_batch_as_large_as_the_dataset_is_one_step() -> None:
    loader = shard_loader(DataLoader(TensorDataset(torch.arange(5)), batch_size=5), Shard(0, 1))
    assert len(loader) == 1
    for _ in loader:
        assert loader.current.even
        assert loader.current.is_last


@pytest.mark.parametrize("what", ["set_epoch", "load_state_dict"])
@pytest.mark.parametrize("may_interleave", [False, True])
def test_a_position_set_in_a_loop_ends_the_loop(what: str, may_interleave: bool) -> None:
    activity = LoaderTracker()
    loader = sharded(activity=activity)
    loader.may_interleave = may_interleave
    state = loader.state_dict()
    iterator = iter(loader)
    next(iterator)
    if what == "set_epoch":
        loader.set_epoch(4)
    else:
        loader.load_state_dict(state)
    assert activity.current is None
    with pytest.raises(
        RuntimeError, match=r"or set_epoch or load_state_dict was called.*leave the loop first"
    ):
        next(iterator)
    assert loader.epoch == (4 if what == "set_epoch" else 0)
    assert sorted(samples(loader)) == sorted(samples(sharded()))


def test_a_loader_says_what_it_is() -> None:
    loader = sharded()
    next(iter(loader))
    assert repr(loader).startswith("ShardedLoader(shard 0 of ")
    assert "epoch 0, position " in repr(loader)
    assert loader.order_source in repr(loader)


@pytest.mark.parametrize(("kind", "context"), [("map", "forkserver"), ("stream", "spawn")])
@pytest.mark.slow
def test_workers_may_be_started_in_any_way(kind: str, context: str) -> None:
    def make() -> ShardedLoader[Any]:
        # Of a room that a new process can import.
        data: Any = torch.arange(20) if kind == "map" else Standing(20)
        loader = DataLoader(
            data, batch_size=2, shuffle=kind == "map", num_workers=1, multiprocessing_context=context
        )
        return shard_loader(loader, Shard(0, 1))

    loader = make()
    begun = list(islice(loader, 3))
    read = torch.cat([*begun, *resumed(make(), loader)])
    assert sorted((read if kind == "map" else read[:, 0]).tolist()) == list(range(20))


@pytest.mark.parametrize("kind", ["order", "batches", "stream"])
@pytest.mark.parametrize("even", ["uneven", "drop"])
def test_the_steps_that_are_left_are_those_that_come(kind: str, even: Any) -> None:
    def make(count: int, size: int) -> ShardedLoader[Any]:
        options: dict[str, Any] = {"batch_size": size}
        if kind == "batches":
            options = {"batch_sampler": list(map(list, torch.arange(20).split(2)))}
        data: Any = Sized() if kind == "stream" else torch.arange(20)
        return shard_loader(DataLoader(data, **options), Shard(0, count), even=even)

    loader = make(1, 3)
    samples(loader, 4)
    rest = resumed(make(3, 2), loader)
    whole, left = len(rest), rest.num_left()
    assert len(list(rest)) == left < whole
    assert rest.num_left() == whole
    skipping = skip_first_batches(rest, 1)
    assert len(skipping) == whole - 1
    assert len(list(skipping)) == whole - 1
    assert rest.num_left() == whole == len(list(rest))


class Sized(IterableDataset[int]):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@pytest.mark.parametrize("num_skipped", [1, 4])
def test_batches_that_a_loaded_state_left_out_are_not_left_out_twice(num_skipped: int) -> None:
    loader = sharded(batch_size=1)
    batches = iter(loader)
    begun = samples(batches, 4)
    whole, state = samples(sharded(batch_size=1)), loader.state_dict()
    before = skip_first_batches(loader, 4)
    batches.close()
    for build in (
        lambda: skip_first_batches(loader, num_skipped),
        lambda: skip_first_batches(skip_first_batches(loader), num_skipped),
        lambda: list(before),
    ):
        loader.load_state_dict(state)
        with pytest.raises(
            ResumedLoaderError, match=r"position 4 of epoch 0, .*\. Delete the call and loop over"
        ):
            build()
    # What is meant is still possible: nothing more left out, the epoch anew, another epoch, the next one.
    assert begun + samples(skip_first_batches(loader, 0)) == whole
    assert len(samples(skip_first_batches(loader, num_skipped))) == 20 - num_skipped
    loader.load_state_dict(state)
    loader.set_epoch(1)
    loader.set_epoch(0)
    assert samples(skip_first_batches(loader, num_skipped)) == whole[num_skipped:]
    loader.load_state_dict({**state, "position": 0})
    assert samples(skip_first_batches(loader, num_skipped)) == whole[num_skipped:]


def test_skips_add_up() -> None:
    whole = samples(sharded(shuffle=False))
    twice = skip_first_batches(skip_first_batches(sharded(shuffle=False), 1), 2)
    assert len(twice) == 2
    assert samples(twice) == whole[12:]
    with pytest.raises(ValueError, match=r"num_batches=1.5: must be an integer"):
        skip_first_batches(sharded(), 1.5)  # pyright: ignore[reportArgumentType]


def test_a_dataset_that_has_grown_is_not_read_in_part() -> None:
    data = [torch.tensor(i) for i in range(4)]
    loader = shard_loader(DataLoader(data), Shard(0, 1))  # pyright: ignore[reportArgumentType]
    assert len(list(loader)) == 4
    data.append(torch.tensor(4))
    with pytest.raises(ValueError, match="had 4 samples when its loader was sharded, and has 5 now"):
        next(iter(loader))


def uneven(shard: int, *, shuffle: bool = False, **options: Any) -> ShardedLoader[Any]:
    base = DataLoader(torch.arange(10), batch_size=4, shuffle=shuffle, **options)
    return shard_loader(base, Shard(shard, 2), even="pad")


def test_tails_are_treated_otherwise_in_a_block() -> None:
    loaders = [uneven(shard) for shard in range(2)]
    padded = [samples(loader) for loader in loaders]
    assert [len(each) for each in padded] == [8, 8]
    treated: list[int] = []
    for loader in loaders:
        with loader.treating_tails("uneven"):
            treated += samples(loader)
    assert sorted(treated) == list(range(10))
    assert [samples(loader) for loader in loaders] == padded
    assert [loader.epoch for loader in loaders] == [2, 2]


def test_an_order_goes_on_where_tails_are_treated_otherwise() -> None:
    expected, loader = uneven(0, shuffle=True), uneven(0, shuffle=True)
    orders = [samples(expected) for _ in range(4)]
    for number, order in enumerate(orders):
        if number % 2:
            with loader.treating_tails("uneven"):
                assert samples(loader) == order[:5]
        else:
            assert samples(loader) == order
    begun = uneven(0, shuffle=True)
    assert samples(begun, 1) == orders[0][:4]
    rest = resumed(uneven(0, shuffle=True), begun)
    with rest.treating_tails("uneven"):
        assert samples(rest) == orders[0][4:5]
    assert samples(rest) == orders[1]


def test_tails_cannot_be_treated_otherwise_inside_a_loop_and_dropped_ones_stay_dropped() -> None:
    loader, dropped = uneven(0), uneven(0, drop_last=True)
    for _ in loader:
        with (
            pytest.raises(RuntimeError, match="a loop over this loader is running"),
            loader.treating_tails("uneven"),
        ):
            pass
        break
    with dropped.treating_tails("uneven"):
        assert len(samples(dropped)) == 4
