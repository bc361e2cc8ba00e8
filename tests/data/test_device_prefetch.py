from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from data.reading import resumed, samples_of
from drivetrain_data import BatchPlan, Shard, shard_loader
from drivetrain_data.device_prefetch import DeviceCopies
from drivetrain_data.sources.batch_source import Reading

META = torch.device("meta")  # has no streams, and copies nothing


def readings(num_steps: int, read: list[int], fails_after: int | None = None) -> Iterator[Reading]:
    for number in range(num_steps):
        if number == fails_after:
            raise OSError("the disk is gone")
        read.append(number)
        plan = BatchPlan(
            real_counts=(1,), sizes=(1,), even=True, is_last=False, replayed=False, advance=number
        )
        yield plan, {"x": torch.ones(number), "name": "a"}, None


@pytest.mark.parametrize("num_ahead", [0, 1, 3, 20])
def test_as_many_batches_as_asked_are_copied_ahead_and_come_in_order(num_ahead: int) -> None:
    read: list[int] = []
    copies = DeviceCopies(META, non_blocking=True, num_ahead=num_ahead).copied(readings(8, read))
    for number, (plan, batch, _) in enumerate(copies):
        assert (plan.advance, batch["x"].shape, batch["x"].device) == (number, (number,), META)
        assert batch["name"] == "a"
        assert len(read) == min(8, number + 1 + num_ahead)


def test_a_profile_names_the_copies() -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        list(DeviceCopies(META, non_blocking=True, num_ahead=1).copied(readings(3, [])))
    (copies,) = (each for each in profiler.key_averages() if each.key == "drivetrain: copy a batch")
    assert copies.count == 3


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_an_error_comes_after_the_batches_before_it(num_ahead: int) -> None:
    arrived: list[int] = []
    copies = DeviceCopies(META, non_blocking=True, num_ahead=num_ahead).copied(readings(8, [], fails_after=5))
    with pytest.raises(OSError, match="the disk is gone"):
        arrived.extend(plan.advance for plan, _, _ in copies)
    assert arrived == list(range(5))


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.default_cases("2-map")
def test_what_is_copied_ahead_does_not_count_as_received(kind: str, workers: int) -> None:
    def make(device: str | None) -> Any:
        data = IterableWrapper(range(40)).sharding_filter() if kind == "stream" else torch.arange(40)
        loader = DataLoader(data, batch_size=2, shuffle=kind == "map", num_workers=workers)
        return shard_loader(loader, Shard(0, 1), device=device, copy_ahead=3)

    loader, plain = make("meta"), make(None)
    assert len(list(islice(loader, 5))) == len(list(islice(plain, 5)))
    assert loader.state_dict() == plain.state_dict()
    assert len(samples_of(resumed(plain, loader))) == 30


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="wants an accelerator")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_what_arrives_on_an_accelerator_is_what_was_read(pinned: bool, num_ahead: int) -> None:
    data = torch.arange(4_000_000).reshape(400, 10_000)
    loader = shard_loader(
        DataLoader(data, batch_size=16, pin_memory=pinned),
        Shard(0, 1),
        device=torch.accelerator.current_accelerator(),
        copy_ahead=num_ahead,
    )
    held: list[torch.Tensor] = []
    for batch in loader:
        held.append((batch * 2).sum())  # on the loop's stream, right after the copy on the other one
        del batch
    assert [int(total) for total in held] == [int(part.sum()) * 2 for part in data.split(16)]
