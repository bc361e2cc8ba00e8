from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain_data.sampling.sample_signature import alike, signature_of


@dataclass
class Pair:
    first: Any
    second: Any


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
        (torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()),  # not looked into
        (np.full((9, 9), 100, np.uint8), np.full((9, 9), 101, np.uint8)),  # another decoder's rounding
        (Image(100), Image(102)),
        ("/tmp/of_node_0/a.png", "/tmp/of_node_1/a.png"),
        ({"a": 1, "b": [2, "c"]}, {"b": [2, "c"], "a": 1}),
        (Pair(1, "x"), Pair(1, "x")),
        ({1, 2}, {3}),
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
    ],
)
def test_samples_that_differ_are_not(one: Any, other: Any) -> None:
    assert not alike(signature_of(one), signature_of(other))
