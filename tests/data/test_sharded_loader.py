import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from data.reading import resumed
from drivetrain_data import DataSettings, IndexRangeError, PermutationSampler, Shard, shard_loader
from drivetrain_data.sampling.order import ReplacementOrder

COUNTS = [1, 2, 4]
SIZES = [0, 1, 3, 8, 9, 17, 64]


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize("even", ["uneven", "pad"])
def test_every_sample_comes_once_in_the_datasets_order(
    make_shards, read_together, count: int, length: int, even: str
) -> None:
    shards = make_shards(lambda: DataLoader(Numbers(length), batch_size=2), count, even=even)
    read = read_together(shards)
    assert read.samples == list(range(length))
    assert len(read.plans) == len(shards[0])
    assert [plan.is_last for plan in read.plans] == [False] * (len(read.plans) - 1) + [True][
        : len(read.plans)
    ]
    if even == "pad":
        assert all(set(plan.sizes) == {2} for plan in read.plans)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("even", "arguments"),
    [
        ("drop", lambda data: {"batch_size": 3}),
        ("uneven", lambda data: {"batch_size": 3, "drop_last": True}),
        ("uneven", lambda data: {"batch_sampler": BatchSampler(SequentialSampler(data), 3, drop_last=True)}),
    ],
)
def test_a_dropped_tail_leaves_full_steps(make_shards, read_together, count: int, even, arguments) -> None:
    data = Numbers(17)
    shards = make_shards(lambda: DataLoader(data, **arguments(data)), count, even=even)
    read = read_together(shards)
    assert read.samples == list(range(17 // (3 * count) * 3 * count))
    assert len(read.plans) == len(shards[0])


@pytest.mark.parametrize(
    ("even", "last"), [("pad", [[8, 0], [1, 2], [3, 4], [5, 6]]), ("uneven", [[8], [8], [8], [8]])]
)
def test_nine_samples_on_four_ranks_count_once_each_and_padding_comes_from_the_beginning(
    make_shards, read_together, even: str, last: list[list[int]]
) -> None:
    read = read_together(make_shards(lambda: DataLoader(Numbers(9), batch_size=2), 4, even=even))
    assert [plan.real_counts for plan in read.plans] == [(2, 2, 2, 2), (1, 0, 0, 0)]
    assert read.held[1] == last
    assert read.plans[1].even == (even == "pad")


@pytest.mark.parametrize("count", COUNTS)
def test_split_batches_makes_the_loaders_batch_the_sum(make_shards, read_together, count: int) -> None:
    shards = make_shards(lambda: DataLoader(Numbers(21), batch_size=8), count, split_batches=True)
    assert (shards[0].batch_size, shards[0].total_batch_size) == (8 // count, 8)
    read = read_together(shards)
    assert [sum(plan.real_counts) for plan in read.plans] == [8, 8, 5]
    assert read.samples == list(range(21))


class Shuffling(Sampler[int]):
    """Draws from a generator of any library, or without one from a library's global one."""

    def __init__(self, library: str, generator: Any) -> None:
        self.library, self.generator = library, generator

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        if self.library == "torch":
            return iter(torch.randperm(23, generator=self.generator).tolist())
        order = list(range(23))
        (self.generator or {"numpy": np.random, "python": random}[self.library]).shuffle(order)
        return iter(order)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("library", "make"),
    [("torch", torch.Generator), ("numpy", np.random.default_rng), ("python", random.Random)],
)
def test_a_sampler_draws_the_same_on_every_rank_whatever_it_draws_from(
    make_shards, read_together, library: str, make, own: bool
) -> None:
    def build() -> DataLoader[int]:
        sampler = Shuffling(library, make() if own else None)
        return DataLoader(Numbers(23), batch_size=3, sampler=sampler)

    before = torch.get_rng_state(), random.getstate()
    shards = make_shards(build, 3, seed=5)
    first, second = read_together(shards).samples, read_together(shards).samples
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert read_together(make_shards(build, 1, seed=5)).samples == first
    assert read_together(make_shards(build, 1, seed=6)).samples != first
    assert "Shuffling, drawn on every rank" in shards[0].order_source


def test_weighted_draws_are_the_same_on_every_rank(make_shards, read_together) -> None:
    def build() -> DataLoader[int]:
        return DataLoader(Numbers(9), batch_size=2, sampler=WeightedRandomSampler([1.0] * 8 + [50.0], 30))

    drawn = [read_together(make_shards(build, count)).samples for count in COUNTS]
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(drawn[0]) == 30
    assert drawn[0].count(8) > 15


class Buckets(Sampler[list[int]]):
    """Batches of several sizes, shuffled, as bucketing by length makes."""

    batch_size = 3

    def __init__(self, num_batches: int) -> None:
        self.batches = [[10 * number + i for i in range(1 + number % 3)] for number in range(num_batches)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("num_batches", [1, 3, 4, 9, 70])
@pytest.mark.parametrize(
    "options", [{"even": "uneven"}, {"even": "pad"}, {"even": "drop"}, {"split_batches": True}], ids=str
)
@pytest.mark.default_cases("3-2", "70-4", "1-4")
def test_batches_of_a_batch_sampler_are_dealt_out_whole_or_split(
    make_shards, read_together, count: int, num_batches: int, options: dict[str, Any]
) -> None:
    def build() -> DataLoader[int]:
        return DataLoader(Numbers(1000), batch_sampler=Buckets(num_batches))

    whole = read_together(make_shards(build, 1))
    assert sorted(whole.samples) == sorted(chain.from_iterable(Buckets(num_batches).batches))
    shards = make_shards(build, count, **options)
    read = read_together(shards)
    num_steps = -(-num_batches // count)
    if options == {"even": "drop"}:
        num_steps = num_batches // count
        del whole.held[num_steps * count :]
    elif "split_batches" in options:
        num_steps = num_batches
    assert read.samples == [sample for (batch,) in whole.held for sample in batch]
    assert len(read.plans) == len(shards[0]) == num_steps
    assert all(plan.is_last for plan in read.plans[-1:])


def test_torchs_own_batch_sampler_is_read_through(make_shards, read_together) -> None:
    def build() -> DataLoader[int]:
        return DataLoader(
            Numbers(11), batch_sampler=BatchSampler(RandomSampler(Numbers(11)), 2, drop_last=False)
        )

    shards = make_shards(build, 2)
    assert sorted(read_together(shards).samples) == list(range(11))
    assert shards[0].batch_size == 2
    assert shards[0].order_source.startswith("shuffled: permutation 1")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("even", ["uneven", "drop"])
def test_single_items_are_dealt_out_in_turn(make_shards, read_together, count: int, even: str) -> None:
    shards = make_shards(lambda: DataLoader(torch.arange(9), batch_size=None), count, even=even)
    held: list[int] = []
    for step in zip(*shards, strict=True):
        plan = shards[0].current
        held += [int(item) for item, real in zip(step, plan.real_counts, strict=True) if real]
    assert held == list(range(9 if even == "uneven" else 9 // count * count))


@pytest.mark.parametrize("count", COUNTS)
def test_samplers_of_torch_are_replaced_by_orders_that_any_rank_can_compute(
    make_shards, read_together, count
) -> None:
    data, all_20 = Numbers(20), list(range(20))
    one_of_two: dict[str, Any] = {"num_replicas": 2, "rank": 1}
    cases: list[tuple[Any, str, list[int] | None]] = [
        (SequentialSampler(data), "the dataset's own order", all_20),
        (RandomSampler(data), "shuffled: permutation 1 keyed by (seed 0, epoch)", all_20),
        (SubsetRandomSampler([3, 5, 9]), "a subset of 3 samples", [3, 5, 9]),
        (DistributedSampler(data, **one_of_two), "shuffled: permutation", all_20),
        (DistributedSampler(data, shuffle=False, **one_of_two), "the dataset's own", all_20),
        (PermutationSampler(20, seed=4), "permutation 1 keyed by (seed 4, epoch)", all_20),
        (RandomSampler(data, num_samples=50), "shuffled: permutation 1", sorted(2 * all_20)),
        (RandomSampler(data, replacement=True, num_samples=100), "drawn with replacement", None),
    ]
    for sampler, source, expected in cases:
        shards = make_shards(lambda sampler=sampler: DataLoader(data, batch_size=3, sampler=sampler), count)
        samples = read_together(shards).samples
        assert source in shards[0].order_source
        if expected is None:  # with replacement, which the replacing order's own tests look at
            assert samples == ReplacementOrder(20, seed=0, num_positions=100).take(0, np.arange(100))
        else:
            assert sorted(samples[: len(expected)]) == expected
        alone = make_shards(lambda s=sampler: DataLoader(data, batch_size=2, sampler=s), 1)
        assert samples == read_together(alone).samples


def test_single_indices_are_no_batches() -> None:
    loader = shard_loader(DataLoader(Numbers(3), batch_sampler=[0, 1, 2]), Shard(0, 1))
    with pytest.raises(ValueError, match="gives lists of indices, and list gave 0; a sampler of single ind"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        (SubsetRandomSampler([0, 1, 7]), "SubsetRandomSampler gave index 7"),
        (SubsetRandomSampler([0, -1, 4]), "SubsetRandomSampler gave index -1"),
        (PermutationSampler(8), "PermutationSampler gave index 7"),
        (RandomSampler(range(8)), "RandomSampler gave index 7"),
        (DistributedSampler(range(8), num_replicas=2, rank=0), "DistributedSampler gave index 7"),
        (SequentialSampler(range(8)), "SequentialSampler gave index 7"),
    ],
)
def test_a_sampler_of_a_longer_dataset_is_refused_at_once(sampler: Any, says: str) -> None:
    with pytest.raises(IndexRangeError, match=rf"{says}, and the dataset has 5 samples \(0 to 4\)"):
        shard_loader(DataLoader(Numbers(5), sampler=sampler), Shard(0, 2))


@pytest.mark.parametrize(
    ("drawn", "says"),
    [
        ([0, 5], r"list gave index 5, and the dataset has 5 samples \(0 to 4\)"),
        ([2, -6], "gave index -6"),
        ([0, np.int64(6)], "gave index 6"),
        ([torch.tensor(7), torch.tensor(1)], "gave index 7"),
        ([0, "a"], "gave 'a' as its number 1"),
        ([0, None], "gave None as its number 1"),
        ([1.0, 2.0], "gave 1.0 as its number 0"),
        ([0, 10**30], "gave index 1000000"),
    ],
)
@pytest.mark.parametrize("batches", [False, True])
def test_what_is_no_index_is_refused_on_every_rank_before_a_sample_is_read(drawn, says, batches) -> None:
    arguments = {"batch_sampler": [[0], drawn]} if batches else {"sampler": drawn}
    for index in range(2):
        loader = shard_loader(DataLoader(Numbers(5), **arguments), Shard(index, 2))
        with pytest.raises(IndexRangeError, match=says):
            next(iter(loader))


def test_indices_of_any_kind_and_keys_are_handed_on() -> None:
    whole = [np.int64(1), torch.tensor(3), True, 0]
    loader = shard_loader(DataLoader(Numbers(5), sampler=whole, batch_size=4), Shard(0, 1))
    assert next(iter(loader)).tolist() == [1, 3, 1, 0]
    keyed = shard_loader(DataLoader({"a": 5, "b": 6}, sampler=["b", "a"], batch_size=2), Shard(0, 1))
    assert next(iter(keyed)).tolist() == [6, 5]


class Reversed(DistributedSampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize("kind", ["subclass", "in a batch sampler", "torchdata"])
def test_a_sampler_that_divides_as_torch_does_is_undone(make_shards, read_together, kind: str) -> None:
    sampler_type: Any = type("Subclass", (DistributedSampler,), {})
    if kind == "torchdata":
        module = pytest.importorskip("torchdata.stateful_dataloader.sampler")
        sampler_type = module.StatefulDistributedSampler
    sampler = sampler_type(Numbers(24), num_replicas=2, rank=0)
    arguments: dict[str, Any] = {"sampler": sampler, "batch_size": 2}
    if kind == "in a batch sampler":
        sampler = DistributedSampler(Numbers(24), num_replicas=2, rank=1)
        arguments = {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}
    shards = make_shards(lambda: DataLoader(Numbers(24), **arguments), 2)
    assert sorted(read_together(shards).samples) == list(range(24))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (lambda part: {"sampler": part(Reversed)}, "Reversed divides the data itself, among num_replicas=2"),
        (
            lambda part: {"batch_sampler": OwnBatches(part(DistributedSampler), 2, drop_last=False)},
            "DistributedSampler inside OwnBatches divides the data itself",
        ),
    ],
)
def test_a_sampler_that_divides_in_its_own_way_is_refused(arguments, says: str) -> None:
    data = Numbers(24)
    loader = DataLoader(data, **arguments(lambda kind: kind(data, num_replicas=2, rank=0)))
    with pytest.raises(ValueError, match=f"{says}.*pass the undivided one"):
        shard_loader(loader, Shard(0, 2))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_samples": -1}, "num_samples=-1"),
        ({"num_samples": 10, "seed": 1.5}, "seed=1.5"),
        ({"num_samples": 10, "epoch": -2}, "epoch=-2"),
    ],
)
def test_a_permutation_of_no_whole_numbers_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"{says}: must be a whole number, 0 or more"):
        PermutationSampler(**arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"batch_size": None}, "3 samples are fewer than one batch of 1 on each of 4"),
        ({"batch_size": 2, "drop_last": True}, "3 samples are fewer than one batch of 2 on each of 4"),
        ({"batch_size": 2, "shuffle": True}, "3 samples are fewer than one batch of 2 on each of 4"),
        ({"batch_sampler": [[0], [1], [2]]}, "3 batches are fewer than one on each of 4 shards"),
    ],
)
def test_a_loader_of_which_all_is_dropped_is_empty_with_one_warning(
    caplog: pytest.LogCaptureFixture, make_shards, read_together, arguments: dict[str, Any], says: str
) -> None:
    even = "uneven" if arguments.get("drop_last") else "drop"
    shards = make_shards(lambda: DataLoader(Numbers(3), **arguments), 4, even=even)
    for epoch in range(2):
        assert [len(shard) for shard in shards] == [0] * 4
        assert read_together(shards).plans == []
        assert shards[0].epoch == epoch
        assert shards[0].state_dict()["epoch"] == epoch + 1
    assert [record.getMessage() for record in caplog.records if says in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert "every epoch of this loader is empty" in caplog.text


@pytest.mark.parametrize("replacement", [True, False])
def test_samples_to_be_drawn_from_an_empty_dataset_are_refused(replacement: bool) -> None:
    sampler = RandomSampler(Numbers(0), replacement=replacement, num_samples=5)
    with pytest.raises(ValueError, match="Sampler has num_samples=5 to draw from a dataset of 0 samples"):
        shard_loader(DataLoader(Numbers(0), sampler=sampler), Shard(0, 1))
    assert list(shard_loader(DataLoader(Numbers(0)), Shard(0, 2))) == []


def test_one_shard_or_one_node_reads_it_all_in_one_block() -> None:
    assert len(list(shard_loader(DataLoader(Numbers(8)), Shard(0, 1), strategy="node"))) == 8
    shard_loader(DataLoader(Numbers(8)), Shard(0, 4), strategy="node", num_nodes=1)


class Noise(Numbers):
    """Draws in workers."""

    def __getitem__(self, index: int) -> float:
        return random.random()


def test_what_workers_draw_is_not_drawn_again_after_a_resume() -> None:
    def build() -> Any:
        return shard_loader(DataLoader(Noise(12), batch_size=3, num_workers=1), Shard(0, 1))

    first = build()
    drawn = next(iter(first))
    assert not set(next(iter(resumed(build(), first))).tolist()) & set(drawn.tolist())
    assert next(iter(build())).tolist() == drawn.tolist()


@pytest.mark.parametrize("thing", [5, [1, 2], "text", iter([1]), Numbers(3)])
def test_what_is_no_loader_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match=f"{type(thing).__name__} is no loader; pass a torch DataLoader"):
        shard_loader(thing, Shard(0, 1))


SPLIT = {"split_batches": True}


@pytest.mark.parametrize(
    ("data", "arguments", "options", "message"),
    [
        (range(9), {"batch_size": 6}, SPLIT, "batch_size=6 must be a mult"),
        (
            range(5),
            {"batch_sampler": [[0]]},
            {**SPLIT, "even": "pad"},
            "with split_batches=True: batches of li",
        ),
        (range(3), {"batch_size": None}, SPLIT, "with batch_size=None there are no batches to split"),
        (IterableWrapper([0]), {"batch_size": None}, SPLIT, "with batch_size=None there are no batches to"),
        (range(9), {"sampler": PermutationSampler(9, epoch=7)}, {}, r"epoch=7: .*call set_epoch\(7\) of the"),
        (range(3), {"in_order": False}, {}, "in_order=False"),
        (range(3), {}, {"dispatch": True}, "dispatch=True: the ranks that share the data"),
        (range(8), {}, {"strategy": "node"}, "number of nodes of the 4 shards is unknown; pass num_nodes="),
    ],
)
def test_a_loader_that_does_not_fit_its_options_is_refused(data, arguments, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_loader(DataLoader(data, **arguments), Shard(0, 4), **options)


def test_a_loader_is_sharded_once() -> None:
    with pytest.raises(ValueError, match="is sharded already"):
        shard_loader(shard_loader(DataLoader(Numbers(3)), Shard(0, 1)), Shard(0, 4))


def test_defaults_are_those_of_the_settings() -> None:
    defaults = shard_loader.__kwdefaults__
    settings = DataSettings()
    for name in ("even", "split_batches", "dispatch", "non_blocking", "copy_ahead", "read_ahead"):
        assert defaults[name] == getattr(settings, name)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"even": "unevn"}, ValueError, "even='unevn': must be one of uneven, pad, drop"),
        ({"even": False}, ValueError, "even=False: must be one of"),
        ({"seed": -1}, ValueError, "seed=-1: must be an integer between"),
        ({"seed": 1.5}, ValueError, "seed=1.5: must be an integer between"),
        ({"seed": None}, ValueError, "seed=None: ranks could not agree on one"),
        ({"copy_ahead": -1}, ValueError, "copy_ahead=-1: must be an integer, 0 or more batches"),
        ({"shard": (0, 2)}, TypeError, r"shard=\(0, 2\): must be a Shard"),
        ({"device": "cud"}, ValueError, "device='cud': must be one of this machine"),
        ({"device": "cuda:99"}, ValueError, "device='cuda:99': must be one of this machine"),
        ({"device": 1.5}, ValueError, r"device=1\.5: must be one of this machine"),
    ],
)
def test_what_is_not_allowed_is_refused_at_once(arguments: Any, error: type[Exception], message: str) -> None:
    shard = arguments.pop("shard", Shard(0, 1))
    with pytest.raises(error, match=message):
        shard_loader(DataLoader(Numbers(3)), shard, **arguments)


def test_a_device_may_be_named() -> None:
    data = [{"x": torch.ones(2), "name": f"sample {i}"} for i in range(3)]
    loader = shard_loader(DataLoader(data), Shard(0, 1), device="meta")
    assert [(batch["x"].device.type, batch["name"]) for batch in loader] == [
        ("meta", [f"sample {i}"]) for i in range(3)
    ]
