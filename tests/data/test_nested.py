from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from drivetrain_data._nested import leading_size, map_leaves, to_device


class Encoding(UserDict):
    """What tokenizers return: a mapping with more to it."""

    def __init__(self, data=None, *, source: str = "tokenizer") -> None:
        super().__init__(data)
        self.source = source


class Pair(NamedTuple):
    left: object
    right: object


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


class Graph:
    """A batch type with a `to` of its own."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.nodes.to(device))


def test_structure_and_types_are_kept() -> None:
    data = {
        "a": [1, (2, Pair(3, None))],
        "b": Encoding({"c": 4}, source="mine"),
        "d": Sample(torch.ones(1), "x"),
    }
    doubled = map_leaves(data, lambda leaf: leaf if leaf is None else leaf * 2)
    assert doubled["a"] == [2, (4, Pair(6, None))]
    assert isinstance(doubled["b"], Encoding)
    assert (dict(doubled["b"]), doubled["b"].source) == ({"c": 8}, "mine")
    assert isinstance(doubled["d"], Sample)
    assert (doubled["d"].image.item(), doubled["d"].name) == (2, "xx")
    assert data["b"]["c"] == 4


def test_whatever_can_move_moves() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {"x": torch.ones(1), "text": "a", "graph": Graph(torch.ones(1)), "packed": packed, "n": 3}
    moved = to_device(batch, torch.device("meta"), non_blocking=True)
    assert (
        moved["x"].device.type
        == moved["graph"].nodes.device.type
        == moved["packed"].data.device.type
        == "meta"
    )
    assert isinstance(moved["packed"], PackedSequence)
    assert (moved["text"], moved["n"]) == ("a", 3)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(3, 2), 3),
        (torch.ones(()), None),
        (np.ones((3, 2)), 3),
        ({"n": 5, "x": torch.ones(3), "y": np.ones(3)}, 3),
        (["a", "b"], 2),
        ({"names": ["a", "b", "c"], "x": torch.ones(3)}, 3),
        ([("a", "b", "c"), (1, 2, 3)], 3),
        (Sample(torch.ones(4), "x"), 4),
        (pack_sequence([torch.ones(5), torch.ones(2), torch.ones(1)]), 3),
        ((pack_sequence([torch.ones(5), torch.ones(2)]), torch.ones(2)), 2),
        ({"extra": [], "x": torch.ones(3)}, 3),
        ("text", None),
        ([], None),
        ({"meta": ["train"], "x": torch.zeros(8, 2)}, None),
        ({"scale": torch.tensor([2.0]), "x": torch.zeros(8, 2)}, None),
        ((torch.ones(3), torch.ones(7)), None),
        ([["a", "b"], ["c"]], None),
    ],
)
def test_a_batch_holds_as_many_samples_as_all_its_parts_say(batch: object, size: int | None) -> None:
    assert leading_size(batch) == size
