import pytest
import torch
from torch import nn

from drivetrain_dispatch.model.model_layout import ModelLayout, units_of
from drivetrain_dispatch.planning.blocks import Block, blocks_of


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
    assert placed(Model()) == [
        ("embed", 160, 0),
        ("layers.0.scale", 16, 1),
        ("layers.0.seen", 16, 2),
        ("layers.0.linear", 64, 3),
        ("layers.0.drop", 0, 4),
        ("layers.1.scale", 16, 5),
        ("layers.1.seen", 16, 6),
        ("layers.1.linear", 64, 7),
        ("layers.1.drop", 0, 8),
        ("head", 40, 0),  # its bias: the weight is the first block's
    ]


def placed(model: nn.Module, **given: object) -> list[tuple[str, int, int]]:
    return [
        (block.name, block.size_bytes, block.group) for block in blocks_of(ModelLayout.of(model), **given)
    ]


class Around(nn.Module):
    """A weight that is in use while the modules inside are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 8, bias=False)


def test_units_are_what_the_engine_brings_at_once() -> None:
    tied = Model()
    (embed, *_, head) = blocks_of(ModelLayout.of(tied))
    assert embed.coming == (160,)
    assert head.coming == (200,)  # with the weight that is the first block's, for it comes again
    scale, first, second = blocks_of(ModelLayout.of(Around()))
    assert (scale.around_bytes, scale.coming, scale.end) == (16, (0,), 2)
    assert (first.coming, second.coming) == ((80,), (128,))
    (whole,) = blocks_of(ModelLayout.of(nn.Sequential(Around())), no_split=["Around"])
    assert (whole.size_bytes, whole.around_bytes, whole.coming) == (224, 16, (80, 128))
    assert whole.need_bytes == 16 + 128
    (at_once,) = blocks_of(ModelLayout.of(nn.Sequential(Around()), at_once=["Around"]))
    assert (at_once.name, at_once.coming) == ("0", (224,))
    assert [
        block.name for block in blocks_of(ModelLayout.of(nn.Sequential(nn.MultiheadAttention(4, 2))))
    ] == ["0"]


def test_blocks_have_the_units_of_the_engine() -> None:
    model = nn.Sequential(Model(), nn.TransformerEncoderLayer(4, 2, 8), nn.LSTM(4, 4), Around())
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    sizes = [
        sum(tensor.nbytes for tensor in unit.tensors.values())
        for unit in units_of(ModelLayout.of(model), parameters)
    ]
    blocks = blocks_of(ModelLayout.of(model), offload_buffers=False)
    found = [size for block in blocks for size in (block.around_bytes, *block.coming) if size]
    assert sorted(found) == sorted(sizes)


def test_buffers_stay_where_they_are_computed_unless_they_are_offloaded() -> None:
    stays = [
        block.stay_bytes
        for block in blocks_of(ModelLayout.of(Model()), no_split=["Layer"], offload_buffers=False)
    ]
    assert stays == [0, 16, 16, 0]
    assert not any(block.stay_bytes for block in blocks_of(ModelLayout.of(Model())))
    (norm,) = blocks_of(ModelLayout.of(nn.BatchNorm1d(4)))
    assert norm.stay_bytes == 4 * 4 + 4 * 4 + 8  # what its forward writes


def test_classes_that_are_not_split_stay_whole() -> None:
    assert placed(Model(), no_split=["Layer"]) == [
        ("embed", 160, 0), ("layers.0", 96, 1), ("layers.1", 96, 2), ("head", 40, 0)
    ]  # fmt: skip


def test_a_model_that_is_one_module_is_one_block() -> None:
    assert blocks_of(ModelLayout.of(nn.Linear(2, 2))) == [Block("", 24, 0)]


def test_without_memory_ties_are_known_too() -> None:
    with torch.device("meta"):
        model = Model()
    model.head.weight = model.embed.weight
    assert [block.group for block in blocks_of(ModelLayout.of(model), no_split=["Layer"])] == [0, 1, 2, 0]


def test_ties_join_through_others() -> None:
    model = nn.ModuleList(nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1)}) for _ in range(4))
    model[2]["a"] = model[0]["a"]
    model[3]["b"] = model[1]["b"]
    model[2]["b"] = model[3]["b"]  # and so the first with the second
    assert [block.group for block in blocks_of(ModelLayout.of(model))] == [0, 0, 0, 0]


def test_a_module_in_two_places_is_placed_once() -> None:
    shared = nn.Linear(2, 2)
    assert blocks_of(ModelLayout.of(nn.Sequential(shared, nn.ReLU(), shared))) == [
        Block("0", 24, 0), Block("1", 0, 1), Block("2", 0, 0, units=(24,))
    ]  # fmt: skip


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.warns(UserWarning, match="the model has no module of class layer; classes are named as"):
        assert blocks_of(ModelLayout.of(Model()), no_split=["layer", "Layer"]) == blocks_of(
            ModelLayout.of(Model()), no_split=["Layer"]
        )
