from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from drivetrain_data import Shard, shard_loader
from drivetrain_data.sources.wrapped_datasets import epoch_parts, holds_iterators


class Told(Dataset[int]):
    """Samples that are the epoch that it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.epoch


class Duck:
    """A dataset of no class of torch's, which reads what it is given somewhere inside."""

    def __init__(self, held: Any, told: Any) -> None:
        self.held, self.told = held, told

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.told.epoch


class Slotted(Dataset[int]):
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.inner[index]


class Stream(IterableDataset[int]):
    def __init__(self, inner: Any) -> None:
        self.parts = {"a": {"b": [inner]}}

    def __iter__(self) -> Iterator[int]:
        inner = self.parts["a"]["b"][0]
        return (inner[index] for index in range(4))


def duck(hold: Any) -> Any:
    return lambda told: Duck(hold(told), told)


WRAPPED: dict[str, Any] = {
    "duck": duck(lambda told: told),
    "nested": duck(lambda told: {"a": {"b": [told]}}),
    "tuple in a deque": duck(lambda told: deque([(1, told)])),
    "slots": Slotted,
    "duck in slots": lambda told: Slotted(Duck(told, told)),
    "slots in a subset": lambda told: Subset(Slotted(told), range(4)),
    "duck in a concatenation": lambda told: ConcatDataset([Duck([told], told)]),  # pyright: ignore[reportArgumentType]
    "stream": Stream,
    "beside much data": lambda told: Duck([list(range(100_000)), *([{"n": 1}] * 900), told], told),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_every_dataset_is_told_the_epoch_whatever_wraps_it(kind: str) -> None:
    loader = shard_loader(DataLoader(WRAPPED[kind](Told()), batch_size=4), Shard(0, 1))
    assert [int(batch[0]) for _ in range(3) for batch in loader] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["duck", "slots", "nested"])
def test_persistent_workers_are_told_too(kind: str) -> None:
    plain = DataLoader(WRAPPED[kind](Told()), batch_size=4, num_workers=1, persistent_workers=True)
    loader = shard_loader(plain, Shard(0, 1))
    assert [int(batch[0]) for _ in range(2) for batch in loader] == [0, 1]


def test_a_transform_with_set_epoch_is_told() -> None:
    class Transform:
        set_epoch = Told.set_epoch

    transform = Transform()
    assert epoch_parts(Duck({"train": [transform]}, transform)) == (transform,)


def test_models_loaders_and_classes_that_a_dataset_holds_are_not_looked_into() -> None:
    class Model(torch.nn.ModuleList):
        pass

    model = Model()
    model.told = Told()  # pyright: ignore[reportAttributeAccessIssue]
    assert epoch_parts(Duck([model, DataLoader(Told()), Told], None)) == ()


def test_only_the_outermost_is_told_and_once() -> None:
    outer = Told()
    outer.inner = Told()  # pyright: ignore[reportAttributeAccessIssue]
    assert epoch_parts([outer, outer], outer, collate=outer.set_epoch) == (outer,)


def test_what_refers_to_itself_ends() -> None:
    told = Told()
    one = Duck(None, told)
    one.held = [one]
    assert epoch_parts(one) == (told,)


@pytest.mark.parametrize("hold", [lambda it: it, lambda it: {"a": {"b": [Slotted(it)]}}, Slotted, list])
def test_iterators_are_found_at_any_depth(hold: Any) -> None:
    assert holds_iterators(Duck(hold(iter([1])) if hold is not list else [iter([1])], None))
    assert not holds_iterators(Duck(hold([1]), None))
