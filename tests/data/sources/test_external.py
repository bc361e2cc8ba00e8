import logging
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from drivetrain_data import Shard, ShardedLoader, UnevenPolicy, shard_loader, skip_first_batches, trim
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sources.external import ExternalSource


class Ready:
    """A loader of its own kind, such as one that decodes on a GPU."""

    def __init__(self, num_batches: int) -> None:
        self.dataset = range(2 * num_batches)
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([2 * i, 2 * i + 1]) for i in range(self.num_batches))


class Doubling(DataLoader[int]):
    """A DataLoader that does something of its own with every batch."""

    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("num_batches", [1, 2, 5, 6])
@pytest.mark.parametrize("even", ["uneven", "pad", "drop"])
def test_batches_are_dealt_out_in_turn(
    make_shards, read_together, count: int, num_batches: int, even: str
) -> None:
    shards = make_shards(lambda: Ready(num_batches), count, even=even)
    read = read_together(shards)
    num_dropped = num_batches % count if even == "drop" else 0
    assert read.samples == list(range(2 * (num_batches - num_dropped)))
    assert len(read.plans) == len(shards[0])
    assert all(plan.is_last for plan in read.plans[-1:])


@pytest.mark.parametrize("even", ["uneven", "pad"])
def test_where_one_rank_reads_an_empty_batch_is_its_shards_own(even: UnevenPolicy) -> None:
    batches = [torch.arange(3), torch.empty(0), torch.arange(2), torch.arange(1)]
    sharding = DataSharding(
        shard=Shard(0, 3), even=even, split=False, strategy="interleaved", num_blocks=1, seed=0, for_all=True
    )
    first, last = ExternalSource(batches, sharding).open(0, 0)
    assert [len(batch) for batch in first[1]] == list(first[0].sizes or ()) == [3, 0, 2]
    assert [len(batch) for batch in last[1]] == ([1] if even == "uneven" else [1, 3, 0])


class Again:
    """A loader whose iterator begins anew when it is asked after its end, as DALI's does."""

    dataset = range(5)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return Round()


class Round:
    position = 0

    def __iter__(self) -> "Round":
        return self

    def __next__(self) -> torch.Tensor:
        self.position = self.position % 6 + 1
        if self.position == 6:
            raise StopIteration
        return torch.tensor([self.position])


def test_a_loader_that_begins_anew_after_its_end_is_not_asked_again() -> None:
    loader = shard_loader(Again(), Shard(0, 2), even="drop")
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[1], [3]] * 2


def test_a_position_is_a_number_of_batches(make_shards, read_together) -> None:
    part = read_together(make_shards(lambda: Ready(7), 2), 1)
    rest = read_together(make_shards(lambda: Ready(7), 3, part.states[-1]))
    assert part.samples + rest.samples == list(range(14))


def test_what_a_loader_does_with_its_batches_is_kept(make_shards, read_together) -> None:
    shards = make_shards(lambda: Doubling(range(9), batch_size=2), 2)
    assert read_together(shards).samples == list(range(0, 18, 2))
    assert "the batches of Doubling, distributed in turn" in shards[0].order_source


def test_batches_of_another_loader_are_not_split() -> None:
    with pytest.raises(ValueError, match="batches of Ready are distributed whole"):
        shard_loader(Ready(3), Shard(0, 2), split_batches=True)


class Standing:
    """A loader that draws its order when an epoch begins, and saves no more than how far it has come."""

    dataset = range(19)

    def __init__(self) -> None:
        self.begun = self.number = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        batches = torch.randperm(19).split(2)
        for number in range(self.begun, len(batches)):
            self.begun, self.number = 0, number + 1
            yield batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begun = state["number"]


DRAWN = {
    "own class": lambda: Doubling(torch.arange(19), batch_size=2, shuffle=True),  # pyright: ignore[reportArgumentType]
    "own state": Standing,
}


def stepped(shards: list[ShardedLoader[Any]], num_steps: int | None = None) -> list[int]:
    """The samples that count of shards that step together."""
    found: list[int] = []
    for batches in islice(zip(*shards, strict=True), num_steps):
        plan = shards[0].current
        assert plan is not None
        found += trim(plan, torch.cat(batches)).tolist()
    return found


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_a_loader_draws_is_the_same_on_every_rank_and_after_a_resume(
    make_shards, kind: str, count: int
) -> None:
    factor = 2 if kind == "own class" else 1
    torch.manual_seed(count)
    random.seed(count)
    np.random.seed(count)
    whole = stepped(make_shards(DRAWN[kind], count))
    assert sorted(whole) == list(range(0, 19 * factor, factor)) != whole
    begun = make_shards(DRAWN[kind], count)
    first = stepped(begun, 2)
    resumed = make_shards(DRAWN[kind], 2, begun[0].state_dict())
    assert first + stepped(resumed) == whole
    again = stepped(resumed)  # the next epoch
    assert sorted(again) == sorted(whole)
    assert again != whole


class Slow(Standing):
    """Takes long enough over a batch for a second snapshot, after it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number, batch in enumerate(super().__iter__()):
            if number == 4:
                time.sleep(0.6)
            yield batch


def test_batches_skipped_in_a_later_epoch_are_found_without_the_states_of_an_earlier_one() -> None:
    epochs = [[batch.tolist() for batch in loader] for loader in [shard_loader(Standing(), Shard(0, 1))] * 2]
    loader = shard_loader(Slow(), Shard(0, 1))
    assert [batch.tolist() for batch in loader] == epochs[0]
    assert [batch.tolist() for batch in skip_first_batches(loader, 2)] == epochs[1][2:]


def test_what_the_program_draws_is_not_felt_by_a_loader_nor_the_other_way_round() -> None:
    loader = shard_loader(DRAWN["own class"](), Shard(0, 1))
    torch.manual_seed(1)
    alone = torch.rand(10).tolist()
    torch.manual_seed(1)
    drawn = [torch.rand(1).item() for _ in loader]
    assert drawn == alone[: len(drawn)]


class Parts:
    """Batches of 8 and 2 samples beside something of another size."""

    dataset = range(20)

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return (self.make(size) for size in (8, 2, 2, 8, 8))


@pytest.mark.parametrize(
    "make",
    [
        lambda size: {"x": np.zeros((size, 2))},
        lambda size: (pack_sequence([torch.zeros(9)] * size), torch.zeros(size)),
    ],
)
def test_batches_of_unequal_sizes_weigh_by_their_samples(make: Callable[[int], Any]) -> None:
    shards = [shard_loader(Parts(make), Shard(rank, 2)) for rank in range(2)]
    for _, plan in zip(zip(*shards, strict=True), ((8, 2), (2, 8), (8, 0)), strict=True):
        for rank, shard in enumerate(shards):
            assert shard.current is not None
            assert shard.current.real_counts == plan
            assert shard.current.weight(rank) == pytest.approx(2 * plan[rank] / sum(plan))
            assert shard.current.replayed == (plan[rank] == 0)
            assert not shard.current.equal_sizes


@pytest.mark.parametrize("part", [["train"], torch.tensor([2.0])])
def test_batches_that_do_not_say_their_sizes_weigh_the_same_and_a_warning_says_so(
    part: object, caplog
) -> None:
    shards = [
        shard_loader(Parts(lambda size: {"part": part, "x": torch.zeros(size, 2)}), Shard(rank, 2))
        for rank in range(2)
    ]
    with caplog.at_level(logging.WARNING):
        for _ in zip(*shards, strict=True):
            for shard in shards:
                assert shard.current is not None
                assert shard.current.sizes is None
                assert shard.current.real_counts in ((1, 1), (1, 0))
                assert [shard.current.weight(rank) for rank in range(2)] in ([1, 1], [2, 0])
    told = [record.message for record in caplog.records]
    assert len(told) == 2  # once a loader
    assert "a batch of Parts does not say how many samples it holds (its parts have sizes 1, 8)" in told[0]
