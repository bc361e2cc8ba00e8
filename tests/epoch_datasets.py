"""Datasets and a collate function that are told the epoch, in a module that a new process can import."""

from collections.abc import Iterator

import torch
from torch.utils.data import Dataset, IterableDataset


class Mapped(Dataset[int]):
    """Samples that depend on the epoch it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.epoch * 100 + index


class Still(Mapped):
    set_epoch = None  # pyright: ignore[reportAssignmentType]


class Streamed(IterableDataset[int]):
    def __init__(self, mapped: Mapped) -> None:
        self.mapped = mapped

    def __iter__(self) -> Iterator[int]:
        return (self.mapped[index] for index in range(4))


class Forwards(Dataset[int]):
    """Tells the dataset that it wraps another number than the epoch."""

    def __init__(self) -> None:
        self.mapped = Mapped()

    def set_epoch(self, epoch: int) -> None:
        self.mapped.set_epoch(epoch + 5)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.mapped[index] - 500


class Collate:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) + 100 * self.epoch

    def collated(self, samples: list[int]) -> torch.Tensor:
        return self(samples)
