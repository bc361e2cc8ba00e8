from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain_data.sampling.sample_signature import alike, is_vague, settled, signature_of


@dataclass
class Pair:
    first: Any
    second: Any


class Plain:
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Key:
    """Shows its address."""


class Image:
    def __init__(self, level: int) -> None:
        self.level = level

    def tobytes(self) -> bytes:
        return bytes([self.level]) * 100


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(9), torch.arange(9)),
        (torch.ones(5), torch.ones(5) * (1 + 1e-6)),  # another machine's arithmetic
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
        (torch.ones(3, device="meta"), torch.zeros(4, device="meta")),  # has no values
        (Path("/tmp/of_node_0/a.png"), "/tmp/of_node_1/a.png"),
        (Plain(1, (2, [3])), Plain(1, (2, [3]))),
        (Plain(1, iter([1])), Plain(1, iter([2]))),  # an iterator is not advanced
        (Plain(1, Lock()), Plain(1, Lock())),
        ({Key(): 1}, {Key(): 1}),
        (np.full((9, 9), 100, np.uint8), np.full((9, 9), 101, np.uint8)),  # another decoder's rounding
        (Image(100), Image(102)),
        ("/tmp/of_node_0/a.png", "/tmp/of_node_1/a.png"),
        ({"a": 1, "b": [2, "c"]}, {"b": [2, "c"], "a": 1}),
        (Pair(1, "x"), Pair(1, "x")),
        ({"a", "b", "c"}, {"c", "b", "a"}),
        (object(), object()),
        (np.array(["a", "b"], dtype=object), np.array(["a", "b"], dtype=object)),
    ],
)
def test_samples_that_may_be_the_same_are_alike(one: Any, other: Any) -> None:
    assert alike(signature_of(one), signature_of(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(0), torch.tensor(1)),
        (torch.tensor(0.0), torch.tensor(1.0)),
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
        (torch.arange(100_000), torch.arange(100_000).roll(1)),
        (np.full((9, 9), 100, np.uint8), np.full((9, 9), 110, np.uint8)),
        (np.array([1, 2], np.uint8), np.array([1, 3], np.uint8)),  # too few for an image
        (Image(100), Image(200)),
        ("/data/a.png", "/data/b.png"),
        ("some text", "other text"),
        (b"one", b"two"),
        (1, 1.0),
        (True, 1),
        (None, 0),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (list(range(1000)), list(range(1, 1001))),
        ((1, 2), (1, 2, 3)),
        (Pair(1, "x"), Pair(1, "y")),
        (np.float32(1), np.float32(2)),
        ({1, 2}, {3}),
        (torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()),
        (Path("/data/a.png"), Path("/data/b.png")),
        (Plain(1, (2, [3])), Plain(1, (2, [4]))),
        (Slots(1), Slots(2)),
        (Plain(1, Slots(Lock())), Plain(2, Slots(Lock()))),
        ({"of": Key(), "n": 1}, {"of": Key(), "n": 2}),
        (np.array([Slots(1)]), np.array([Slots(2)])),
        (dict.fromkeys(range(2000), 1), dict.fromkeys(range(2000), 2)),
        (date(2020, 1, 1), date(2020, 1, 2)),
        (Fraction(1, 2), Fraction(1, 3)),
    ],
)
def test_samples_that_differ_are_not(one: Any, other: Any) -> None:
    assert not alike(signature_of(one), signature_of(other))


def test_samples_that_refer_to_themselves_or_to_very_much_are_described() -> None:
    loop = Plain(1, [])
    loop.second.append(loop)
    tower: Any = []
    for _ in range(3000):
        tower = [tower]
    crowd = [[[Slots(each) for each in range(60)] for _ in range(60)] for _ in range(60)]
    for sample in (loop, tower, crowd):
        assert alike(signature_of(sample), signature_of(sample))
        assert len(str(signature_of(sample))) < 200_000


def test_only_the_samples_own_parts_of_objects_count() -> None:
    """An object's parts do not count that another read changes or that all samples share; those of a list do."""

    def read(process: int, time: float) -> dict[Any, Any]:
        return {n: signature_of(Plain({"n": n, "process": process}, [time + n])) for n in range(4)}

    one, other = (settled(read(process, process), read(process, process + 0.5)) for process in (1, 2))
    assert all(alike(one[n], other[n]) for n in range(4))
    assert not any(alike(one[n], other[n - 1]) for n in range(1, 4))
    lists = {n: signature_of([n, 1]) for n in range(3)}
    assert settled(lists, lists) == lists


def test_samples_are_vague_if_nothing_that_can_be_described_tells_them_apart() -> None:
    for samples, vague in {
        (Lock(), Lock()): True,
        (Plain(1, Lock()), Plain(1, Lock())): True,
        (Plain(1, Lock()), Plain(2, Lock())): False,
        ((1, Lock()), (2, Lock())): False,
        (0, 0): False,
        (): False,
    }.items():
        read = {n: signature_of(sample) for n, sample in enumerate(samples)}
        assert is_vague(settled(read, read)) == vague
