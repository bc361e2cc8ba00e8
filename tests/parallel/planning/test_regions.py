from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drivetrain_parallel import Cut
from drivetrain_parallel.layers.divided_layers import kind_of
from drivetrain_parallel.planning.regions import (
    RegionShape,
    column_plan,
    drops,
    layer_sizes,
    numbers_of_heads,
    output_cuts,
    proposals,
    untried_proposal,
)
from optional_modules import import_later
from parallel.models import WIDTH, Attention, Block, GatedPerceptron, GroupedAttention, Perceptron

PERCEPTRON = RegionShape(module=Perceptron(hidden=33), columns=("up",), row="down")
ATTENTION = RegionShape(module=Attention(), columns=("query", "key", "value"), row="output")
FUSED = RegionShape(module=Block(), columns=("qkv",), row="attended")


def layouts(shape: RegionShape, size: int) -> list[tuple[int, list[tuple[int, ...]]]]:
    """The numbers of units that are proposed, and the pieces of the column layers, each once."""
    found: list[tuple[int, list[tuple[int, ...]]]] = []
    for plan in proposals(shape, size):
        cuts = [layer.cuts["weight"] for layer in plan.layers if layer.style == "column"]
        one = (cuts[0].num_units, [cut.pieces for cut in cuts])
        if one not in found:
            found.append(one)
    return found


def test_the_features_of_a_perceptron_are_its_units() -> None:
    assert layouts(PERCEPTRON, 4) == [(33, [(33,)])]
    (plan,) = proposals(PERCEPTRON, 4)
    column, row = plan.layers
    assert (column.style, row.style) == ("column", "row")
    assert column.region == row.region == row.name == "down"
    assert column.cuts == {name: Cut(dim=0, pieces=(33,), num_units=33) for name in ("weight", "bias")}
    assert row.cuts == {"weight": Cut(dim=1, pieces=(33,), num_units=33)}


def test_a_gate_and_its_values_are_two_pieces() -> None:
    shape = RegionShape(module=GatedPerceptron(), columns=("gate_up",), row="down")
    assert layouts(shape, 2) == [(32, [(32, 32)])]


def test_attention_is_divided_by_heads() -> None:
    assert layouts(ATTENTION, 2) == [(4, [(16,)] * 3)]
    assert layouts(ATTENTION, 5) == []


def test_a_fused_projection_is_three_pieces_or_heads() -> None:
    assert layouts(FUSED, 2) == [(4, [(16, 16, 16)]), (4, [(48,)])]


def test_keys_and_values_of_fewer_heads_decide_the_units() -> None:
    shape = RegionShape(module=GroupedAttention(), columns=("qkv",), row="output")
    assert layouts(shape, 2) == [
        (16, [(16, 16)]),
        (2, [(16, 8, 8)]),
        (2, [(32,)]),
        (4, [(16, 8, 8)]),
        (4, [(32,)]),
    ]


def test_a_piece_that_is_said_leaves_the_layouts_of_that_number() -> None:
    said = RegionShape(module=Block(), columns=("qkv",), row="attended", pieces={"qkv": 3})
    assert layouts(said, 2) == [(4, [(16, 16, 16)])]
    other = RegionShape(module=Block(), columns=("qkv",), row="attended", pieces={"qkv": 2})
    assert layouts(other, 2) == []


def test_no_more_ranks_than_units() -> None:
    assert layouts(PERCEPTRON, 34) == []


def test_numbers_that_may_change_are_proposed_after_those_that_stay() -> None:
    changes = [[(one.attribute, one.whole) for one in plan.attributes] for plan in proposals(ATTENTION, 2)]
    assert changes == [[], [("num_heads", 4)]]
    assert all(one.region == "output" for plan in proposals(ATTENTION, 2) for one in plan.attributes)


@pytest.mark.parametrize("name", ["head_dim", "head_size", "num_head_groups", "hidden_heads", "layer_heads"])
def test_a_size_of_heads_is_no_number_of_heads(name: str) -> None:
    module = nn.Module()
    setattr(module, name, 4)
    assert numbers_of_heads(module, WIDTH) == []


def test_numbers_of_heads_are_read_from_modules_and_their_configurations() -> None:
    module = nn.Sequential(Attention())
    module.config = Perceptron()
    module.config.num_key_value_heads = 2
    module.config.use_heads = True
    module.config.num_heads_of_another = 5  # 16 features are not of 5 heads
    assert numbers_of_heads(module, WIDTH) == [2, 4]


def test_a_probability_of_the_configuration_counts() -> None:
    module = Perceptron()
    module.config = SimpleNamespace(attention_dropout=0.0)  # type: ignore[assignment]
    assert not drops(module)
    module.config.attention_dropout = 0.1  # type: ignore[union-attr]
    assert drops(module)


def test_regions_that_drop_at_random_are_told() -> None:
    def is_random(module: nn.Module) -> bool:
        shape = RegionShape(module=module, columns=("up",), row="down")
        return next(proposals(shape, 2)).random == frozenset({"down"})

    assert is_random(Perceptron(nn.Dropout(0.1)))
    assert not is_random(Perceptron(nn.Dropout(0.0)))
    assert not is_random(Perceptron())


def test_what_cannot_be_tried_changes_no_number_and_takes_the_fewest_heads() -> None:
    plan = untried_proposal(ATTENTION, 2)
    assert plan is not None
    assert plan.attributes == ()
    assert {layer.cuts["weight"].num_units for layer in plan.layers} == {4}
    assert untried_proposal(ATTENTION, 5) is None
    perceptron = untried_proposal(PERCEPTRON, 4)
    assert perceptron is not None
    assert perceptron.layers[0].cuts["weight"].num_units == 33


def test_a_fused_layer_that_cannot_be_tried_wants_its_pieces() -> None:
    said = RegionShape(module=Block(), columns=("qkv",), row="attended", pieces={"qkv": 3})
    plan = untried_proposal(said, 2)
    assert plan is not None
    assert plan.layers[0].cuts["weight"].pieces == (16, 16, 16)


def test_a_layer_without_bias_has_one_cut() -> None:
    layer = nn.Linear(4, 6, bias=False)
    kind = kind_of(layer)
    assert kind is not None
    assert output_cuts(layer, kind, (6,), 6) == {"weight": Cut(dim=0, pieces=(6,), num_units=6)}
    assert layer_sizes(layer) == (4, 6)


def test_a_convolution_of_transformers_is_a_transposed_layer() -> None:
    layer = import_later("transformers.pytorch_utils").Conv1D(6, 4)
    assert layer_sizes(layer) == (4, 6)
    assert column_plan(layer, "fc", (6,), 6, region="out").cuts["weight"].dim == 1
    assert isinstance(layer.weight, torch.nn.Parameter)
