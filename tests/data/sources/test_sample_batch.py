from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain_data.sources.sample_batch import sample_batch

VALUES = torch.arange(6.0)


class Drawing(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int) -> Tensor:
        return VALUES[place] + torch.rand(3)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from VALUES


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_is_collated_as_the_loader_does_it_and_draws_nothing(num_workers: int) -> None:
    def collate(given: list[Tensor]) -> dict[str, Tensor]:
        return {"x": torch.stack(given)}

    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=num_workers, collate_fn=collate)
    before = torch.get_rng_state()
    assert sample_batch(loader, 4)["x"].shape == (4, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_fewer_samples_than_a_batch_are_repeated() -> None:
    (batch,) = sample_batch(DataLoader(TensorDataset(VALUES)), 8)
    assert batch.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize("loader", [DataLoader(Stream()), [VALUES], DataLoader(TensorDataset(VALUES[:0]))])
def test_data_that_can_be_read_once_is_left_alone(loader: Any) -> None:
    assert sample_batch(loader, 2) is None
