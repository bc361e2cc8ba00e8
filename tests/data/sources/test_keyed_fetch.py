import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from drivetrain_data import Shard, shard_loader
from epoch_datasets import Collate, Forwards, Mapped, Still, Streamed


def set_up(_worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert len(info.dataset) == 6
    assert int(info.dataset[2]) == 2


def test_a_workers_set_up_sees_the_dataset() -> None:
    loader = shard_loader(
        DataLoader(
            torch.arange(6),  # pyright: ignore[reportArgumentType]
            batch_size=2,
            num_workers=1,
            persistent_workers=True,
            worker_init_fn=set_up,
        ),
        Shard(0, 1),
    )
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def of_epochs(kind: str) -> DataLoader[Any]:
    plain: Any = torch.arange(4)
    datasets: dict[str, Any] = {
        "mapped": Mapped(),
        "subset": Subset(Mapped(), range(4)),
        "concat": ConcatDataset([Mapped(), Subset(Mapped(), [])]),
        "forwards": Forwards(),
        "streamed": Streamed(Mapped()),
        "collated stream": Streamed(Still()),
    }
    collates: dict[str, Any] = {
        "collate": Collate(),
        "method": Collate().collated,
        "collated stream": Collate(),
    }
    return DataLoader(datasets.get(kind, plain), batch_size=4, collate_fn=collates.get(kind))


EPOCH_KINDS = ["mapped", "subset", "concat", "forwards", "streamed", "collate", "method", "collated stream"]


@pytest.mark.parametrize("kind", EPOCH_KINDS)
def test_every_dataset_and_collate_function_with_set_epoch_is_told_each_epoch(kind: str) -> None:
    loader = shard_loader(of_epochs(kind), Shard(0, 1))
    first = [int(batch[0]) for _ in range(3) for batch in loader]
    loader.set_epoch(7)
    assert first + [int(batch[0]) for batch in loader] == [0, 100, 200, 700]
    resumed = shard_loader(of_epochs(kind), Shard(0, 1))
    resumed.load_state_dict(loader.state_dict())
    assert [int(batch[0]) for batch in resumed] == [800]


@pytest.mark.parametrize(
    "kind", ["mapped", *(pytest.param(kind, marks=pytest.mark.slow) for kind in EPOCH_KINDS[1:])]
)
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_an_epoch_reaches_persistent_workers(kind: str, context: str) -> None:
    plain = of_epochs(kind)
    loader = shard_loader(
        DataLoader(
            plain.dataset,
            batch_size=4,
            collate_fn=plain.collate_fn,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context=context,
        ),
        Shard(0, 1),
    )
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


def drawn(num_workers: int, rank: int = 0, count: int = 2, **options: Any) -> list[torch.Tensor]:
    """What is read in two epochs, where the program draws for itself too."""
    loader = shard_loader(
        DataLoader(
            Draws(),
            batch_size=3,
            shuffle=True,
            num_workers=num_workers,
            collate_fn=draw_while_collating,
            persistent_workers=num_workers > 1,
        ),
        Shard(rank, count),
        seed=5,
        draws_apart=True,
        **options,
    )
    torch.manual_seed(3)
    state = loader.state_dict()
    read: list[torch.Tensor] = []
    for number, batch in enumerate(batch for _ in range(2) for batch in loader):
        read += [batch, torch.rand(2)]  # dropout, say
        state = loader.state_dict() if number == 1 else state
    resumed = shard_loader(
        DataLoader(Draws(), batch_size=3, shuffle=True, collate_fn=draw_while_collating),
        Shard(rank, count),
        draws_apart=True,
    )
    resumed.load_state_dict(state)
    assert all(
        torch.equal(one, other) for one, other in zip(resumed, read[4 : len(read) // 2 : 2], strict=True)
    )
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


class Sixteen(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(16))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "options", "who"),
    [
        (Stops(), {"batch_size": 2}, "Stops, reading sample 9, let a StopIteration out"),
        (Stops(), {"batch_size": None}, "Stops, reading sample 9, let"),
        (StopsInBatches(), {"batch_size": 2}, r"StopsInBatches, reading the batch \[8, 9\], let"),
        (torch.arange(16), {"batch_size": 2, "collate_fn": stop_while_collating}, "Tensor's loader let"),
        (Sixteen(), {"batch_size": 2, "collate_fn": stop_while_collating}, "the collate function let"),
    ],
)
@pytest.mark.default_cases("dataset0")
def test_a_stop_iteration_that_is_no_end_is_an_error(
    dataset: Any, options: dict[str, Any], who: str, num_workers: int
) -> None:
    loader = shard_loader(DataLoader(dataset, num_workers=num_workers, **options), Shard(0, 1))
    with pytest.raises(RuntimeError, match=who):
        list(loader)
