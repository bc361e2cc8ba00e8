import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from data.reading import resumed, samples_of
from drivetrain_data import Shard, ShardedLoader, shard_loader
from epoch_datasets import Collate, Forwards, Mapped, Still, Streamed


def set_up(_worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert len(info.dataset) == 6
    assert int(info.dataset[2]) == 2


def test_a_workers_set_up_sees_the_dataset() -> None:
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "worker_init_fn": set_up}
    loader = shard_loader(DataLoader(torch.arange(6), batch_size=2, **workers), Shard(0, 1))
    for _ in range(2):
        assert samples_of(loader) == list(range(6))


# By kind: the dataset, and the collate function.
TOLD: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mapped": lambda: (Mapped(), None),
    "subset": lambda: (Subset(Mapped(), range(4)), None),
    "concat": lambda: (ConcatDataset([Mapped(), Subset(Mapped(), [])]), None),
    "forwards": lambda: (Forwards(), None),
    "streamed": lambda: (Streamed(Mapped()), None),
    "collate": lambda: (torch.arange(4), Collate()),
    "method": lambda: (torch.arange(4), Collate().collated),
    "collated stream": lambda: (Streamed(Still()), Collate()),
}


def of_epochs(kind: str, **workers: Any) -> ShardedLoader[Any]:
    dataset, collate = TOLD[kind]()
    return shard_loader(DataLoader(dataset, batch_size=4, collate_fn=collate, **workers), Shard(0, 1))


@pytest.mark.parametrize("kind", TOLD)
def test_every_dataset_and_collate_function_with_set_epoch_is_told_each_epoch(kind: str) -> None:
    loader = of_epochs(kind)
    first = [int(batch[0]) for _ in range(3) for batch in loader]
    loader.set_epoch(7)
    assert first + [int(batch[0]) for batch in loader] == [0, 100, 200, 700]
    assert samples_of(resumed(of_epochs(kind), loader))[0] == 800


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.default_cases("fork-mapped")
def test_an_epoch_reaches_persistent_workers(kind: str, context: str) -> None:
    loader = of_epochs(kind, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    first = [int(batch[0]) for _ in range(2) for batch in loader]
    loader.set_epoch(7)
    assert first + [int(batch[0]) for batch in loader] == [0, 100, 700]


class Draws(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


def draw_while_collating(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([*samples, torch.rand(1)])


def drawn(num_workers: int, rank: int = 0) -> list[torch.Tensor]:
    """What is read in two epochs, where the program draws for itself too."""

    def build(**options: Any) -> ShardedLoader[Any]:
        loader = DataLoader(Draws(), batch_size=3, shuffle=True, collate_fn=draw_while_collating, **options)
        return shard_loader(loader, Shard(rank, 2), seed=5, draws_apart=True)

    loader, rest = build(num_workers=num_workers, persistent_workers=num_workers > 1), build()
    torch.manual_seed(3)
    read: list[torch.Tensor] = []
    for number, batch in enumerate(batch for _ in range(2) for batch in loader):
        read += [batch, torch.rand(2)]  # dropout, say
        if number == 1:
            rest.load_state_dict(loader.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(rest, read[4 : len(read) // 2 : 2], strict=True))
    return read


def test_draws_are_the_same_with_any_number_of_workers_and_after_a_resume() -> None:
    alone = drawn(0)
    for other in (drawn(1), drawn(2)):
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
    second = drawn(0, rank=1)
    assert not torch.equal(alone[0].sort().values, second[0].sort().values)
    assert alone[0][1] != second[0][1]  # another draw on another shard
    assert torch.equal(alone[1], second[1])  # the program's own are left alone


class Stops(Dataset[torch.Tensor]):
    """Lets a StopIteration out at sample 9, or in the batch that holds it."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            next(iter(()))
        return torch.tensor(index)


class StopsInBatches(Stops):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def stop_while_collating(samples: list[torch.Tensor]) -> torch.Tensor:
    if any(int(sample) == 9 for sample in samples):
        next(iter(()))
    return torch.stack(samples)


SIXTEEN = IterableWrapper(torch.arange(16))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "options", "who"),
    [
        (Stops(), {"batch_size": 2}, "Stops, reading sample 9, raised StopIteration"),
        (Stops(), {"batch_size": None}, "Stops, reading sample 9, raised StopIteration"),
        (StopsInBatches(), {"batch_size": 2}, r"StopsInBatches, reading the batch \[8, 9\], raised"),
        (torch.arange(16), {"batch_size": 2, "collate_fn": stop_while_collating}, "Tensor's loader raised"),
        (SIXTEEN, {"batch_size": 2, "collate_fn": stop_while_collating}, "the collate function raised"),
    ],
)
@pytest.mark.default_cases("dataset0")
def test_a_stop_iteration_that_is_no_end_is_an_error(
    dataset: Any, options: dict[str, Any], who: str, num_workers: int
) -> None:
    loader = shard_loader(DataLoader(dataset, num_workers=num_workers, **options), Shard(0, 1))
    with pytest.raises(RuntimeError, match=who):
        list(loader)
