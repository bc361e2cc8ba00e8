"""Every setting of the data section reaches the loader."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from drivetrain import Accelerator, set_seed
from plain_loop.case import own_rank


class Counting(IterableDataset[int]):
    """Ten thousand samples of 40 kB, of which `read` were asked for."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(100):
            self.read += 1
            yield torch.full((10_000,), float(index))


def first_batches(data: dict[str, Any], shuffle: bool = False) -> list[int]:
    accelerator = Accelerator(cpu=True, seed=0, data=data)
    loader = accelerator.prepare(DataLoader(torch.arange(12), batch_size=4, shuffle=shuffle))
    return next(iter(loader)).tolist()


def samples_read_at_the_first_batch(read_ahead: bool) -> int:
    accelerator = Accelerator(cpu=True, data={"read_ahead": read_ahead})
    stream = Counting()
    batches = iter(accelerator.prepare(DataLoader(stream, batch_size=4)))
    next(batches)
    read = stream.read
    batches.close()
    return read


@pytest.mark.parametrize(
    ("data", "by_rank"),
    [
        ({}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"strategy": "block"}, [[0, 1, 2, 3], [6, 7, 8, 9]]),
        ({"strategy": "node"}, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # two ranks of one node
        ({"split_batches": True}, [[0, 1], [2, 3]]),
        ({"dispatch": True}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
@pytest.mark.ranks(2)
def test_ranks_read_what_the_settings_say(data: dict[str, Any], by_rank: list[list[int]]) -> None:
    assert first_batches(data) == by_rank[own_rank()]


@pytest.mark.ranks(2)
def test_the_seed_of_the_data_decides_the_order() -> None:
    orders = [first_batches({"seed": seed}, True) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def orders(loaders: Sequence[DataLoader[Any]], **arguments: Any) -> list[list[int]]:
    """What this rank reads of each loader, with the seeds that the plan names."""
    accelerator = Accelerator(cpu=True, sections={"run": {"show_plan": False}}, **arguments)
    prepared = [accelerator.prepare(loader) for loader in loaders]
    details = accelerator.plan.details
    assert [details[f"data seed {i}"].split(":")[0] for i in range(len(prepared))] == [
        str(loader.seed) for loader in prepared
    ]
    return [torch.cat(list(loader)).tolist() for loader in prepared]


def shuffled(generator: torch.Generator | None = None) -> DataLoader[Any]:
    return DataLoader(torch.arange(40), batch_size=4, shuffle=True, generator=generator)


def orders_by_seed() -> dict[str, list[list[int]]]:
    rank = int(os.environ["RANK"])
    found: dict[str, list[list[int]]] = {}
    for seed in (1, 1, 2):
        torch.manual_seed(seed + 100 * rank)  # rank 0's counts on all ranks
        found.setdefault("manual_seed", []).append(orders([shuffled()])[0])
        set_seed(seed, rank_offset=rank)
        found.setdefault("set_seed", []).append(orders([shuffled()])[0])
        found.setdefault("run", []).append(orders([shuffled()], seed=seed)[0])
        found.setdefault("data", []).append(orders([shuffled()], seed=9, data={"seed": seed})[0])
        generator = torch.Generator().manual_seed(seed + 100 * rank)
        found.setdefault("generator", []).append(orders([shuffled(generator)], seed=9)[0])
        sampler = NumpySampler(np.random.default_rng(seed + 100 * rank))
        own = DataLoader(torch.arange(40), batch_size=4, sampler=sampler)
        found.setdefault("sampler", []).append(orders([own], seed=9)[0])
        # Nothing seeded at all: torch's own number, another one on each rank.
        torch.seed()
        found.setdefault("nothing", []).append(orders([shuffled()])[0])
    return found


class NumpySampler(Sampler[int]):
    """Shuffles by a generator of its own."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        yield from self.generator.permutation(40).tolist()

    def __len__(self) -> int:
        return 40


@pytest.mark.slow
def test_the_order_follows_what_was_seeded_and_is_rank_0s_on_every_rank(run_ranks) -> None:
    first, second = run_ranks(orders_by_seed)
    for name in first:
        for one, other in zip(first[name], second[name], strict=True):
            assert sorted(one + other) == list(range(40)), name  # no sample lost, none twice
        if name != "nothing":
            assert first[name][0] == first[name][1], name
        assert first[name][1] != first[name][2], name
    assert first["manual_seed"] == first["set_seed"] == first["run"] == first["data"] == first["generator"]


def test_loaders_of_one_run_do_not_share_an_order() -> None:
    torch.manual_seed(3)
    one, other = orders([shuffled(), shuffled()])
    assert one != other
    assert orders([shuffled(), shuffled()]) == [one, other]
    # Generators seeded alike give loaders that go together, as torch's do; one that is shared does not.
    alike = [shuffled(torch.Generator().manual_seed(3)) for _ in range(2)]
    assert orders(alike) == [one, one]
    generator = torch.Generator().manual_seed(3)
    first, second = orders([shuffled(generator), shuffled(generator)])
    assert first == one != second


def test_preparing_draws_nothing_from_torchs_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    orders([shuffled(), shuffled()])
    assert torch.equal(before, torch.get_rng_state())


def test_a_generator_that_overrules_the_setting_is_told(caplog: pytest.LogCaptureFixture) -> None:
    orders([shuffled(torch.Generator().manual_seed(3))], data={"seed": 5})
    assert "data.seed=5 does not order loader 0: its own generator does, with seed 3" in caplog.text


def test_a_resume_goes_on_in_the_saved_order_whatever_is_seeded_now(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[Accelerator, Any]:
        torch.manual_seed(seed)
        accelerator = Accelerator(cpu=True, project_dir=tmp_path, sections={"run": {"show_plan": False}})
        return accelerator, accelerator.prepare(shuffled())

    accelerator, loader = build(1)
    seen = list(next(iter(loader)))
    accelerator.save_state()
    manifest = accelerator.plan.as_dict()["settings"]["data.seed"]
    assert (manifest["asked"], manifest["applied"]) == (None, 1)
    accelerator.end_training()
    accelerator, loader = build(2)
    assert loader.seed == 2
    accelerator.load_state()
    assert loader.seed == 1
    assert accelerator.plan.details["data seed 0"] == "1: the loader state that was loaded"
    whole, rest = orders_of_seed(1), torch.cat(list(loader)).tolist()
    assert [*map(int, seen), *rest] == whole
    accelerator.end_training()


def orders_of_seed(seed: int) -> list[int]:
    torch.manual_seed(seed)
    return orders([shuffled()])[0]


@pytest.mark.ranks(2)
def test_reading_ahead_reads_the_next_message_before_the_loop_has_this_one() -> None:
    behind, ahead = map(samples_read_at_the_first_batch, (False, True))
    assert ahead > behind or own_rank()  # rank 0 reads for all
