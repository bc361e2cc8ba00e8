import pytest
import torch
from torch import nn

from drivetrain_dispatch.blocks import Block, blocks_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.drop = nn.Dropout()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_parameter("shift", None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight


def test_a_model_falls_into_leaves_and_the_tensors_beside_them() -> None:
    assert blocks_of(Model()) == [
        Block("embed", 160, 0),
        Block("layers.0.scale", 16, 1),
        Block("layers.0.seen", 16, 2),
        Block("layers.0.linear", 64, 3),
        Block("layers.0.drop", 0, 4),
        Block("layers.1.scale", 16, 5),
        Block("layers.1.seen", 16, 6),
        Block("layers.1.linear", 64, 7),
        Block("layers.1.drop", 0, 8),
        Block("head", 40, 0),  # its bias: the weight is the first block's
    ]


def test_classes_that_are_not_split_stay_whole() -> None:
    assert blocks_of(Model(), no_split=["Layer"]) == [
        Block("embed", 160, 0), Block("layers.0", 96, 1), Block("layers.1", 96, 2), Block("head", 40, 0)
    ]  # fmt: skip


def test_sizes_are_those_after_conversion() -> None:
    blocks = blocks_of(
        Model(), no_split=["Layer"], dtype=torch.float16, special_dtypes={"layers.1.scale": torch.float32}
    )
    assert [block.size_bytes for block in blocks] == [80, 32 + 8 + 16, 32 + 16 + 16, 20]


def test_a_model_that_is_one_module_is_one_block() -> None:
    assert blocks_of(nn.Linear(2, 2)) == [Block("", 24, 0)]


def test_without_memory_ties_are_known_too() -> None:
    with torch.device("meta"):
        model = Model()
    model.head.weight = model.embed.weight
    assert [block.group for block in blocks_of(model, no_split=["Layer"])] == [0, 1, 2, 0]


def test_ties_join_through_others() -> None:
    model = nn.ModuleList(nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1)}) for _ in range(4))
    model[2]["a"] = model[0]["a"]
    model[3]["b"] = model[1]["b"]
    model[2]["b"] = model[3]["b"]  # and so the first with the second
    assert [block.group for block in blocks_of(model)] == [0, 0, 0, 0]


def test_a_module_in_two_places_is_placed_once() -> None:
    shared = nn.Linear(2, 2)
    assert blocks_of(nn.Sequential(shared, nn.ReLU(), shared)) == [
        Block("0", 24, 0), Block("1", 0, 1), Block("2", 0, 0)
    ]  # fmt: skip


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.warns(UserWarning, match="the model has no module of class layer; classes are named as"):
        assert blocks_of(Model(), no_split=["layer", "Layer"]) == blocks_of(Model(), no_split=["Layer"])
    with pytest.raises(ValueError, match=r"special_dtypes=\['head.scale'\]: the model has no such"):
        blocks_of(Model(), special_dtypes={"head.scale": torch.float16})
