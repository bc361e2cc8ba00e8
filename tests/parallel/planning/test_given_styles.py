from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain_parallel import Cut, ParallelPlanError, plan_model
from drivetrain_parallel.planning.given_styles import GivenStyle, read_library_plan, read_patterns
from parallel.divided import assert_same, divided_alike, with_random_values
from parallel.models import WIDTH, Attention, Block, Conditioned, ConditionedAttention, Perceptron

INPUTS = [torch.randn(2, 5, WIDTH, dtype=torch.float64)]
TOKENS = torch.tensor([[0, 1, 2, 3], [8, 7, 3, 3]])
HEADS = {"*.query": "column", "*.key": "column", "*.value": "column", "*.output": "row"}


class Words(nn.Module):
    """An embedding, a perceptron and a head."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(9, WIDTH, **options), Perceptron()
        self.head = nn.Linear(WIDTH, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.words(tokens)))


class FusedAttention(nn.Module):
    """Query, key and value in one layer; heads of 4 features, of which it holds no number."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.config = SimpleNamespace(num_attention_heads=4)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        query, key, value = (
            one.unflatten(-1, (-1, 4)).transpose(1, 2) for one in self.qkv(x * condition.sum()).chunk(3, -1)
        )
        return self.output(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Planned(nn.Module):
    """Brings a plan, as models of transformers do."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.tp_plan = plan
        self.layers = nn.ModuleList(Perceptron() for _ in range(2))
        self.conv, self.norm = nn.Conv1d(3, 3, 3), nn.LayerNorm(WIDTH)


def test_a_pattern_gives_its_style_to_all_that_it_matches() -> None:
    model = nn.Sequential(Block(), Block())
    assert read_patterns(model, {"*.qkv": "column/3", "1.attended": "row"}) == {
        "0.qkv": GivenStyle("column", 3),
        "1.qkv": GivenStyle("column", 3),
        "1.attended": GivenStyle("row"),
    }


def test_the_last_pattern_that_matches_wins() -> None:
    model = nn.Sequential(Perceptron(), Perceptron())
    given = read_patterns(model, {"*.up": "column", "*.down": "row", "0.*": "whole"})
    assert given == {
        "0.up": GivenStyle(None),
        "0.down": GivenStyle(None),
        "0.between": GivenStyle(None),
        "1.up": GivenStyle("column"),
        "1.down": GivenStyle("row"),
    }


@pytest.mark.parametrize("style", ["rows", "row/2", "column/x", ""])
def test_an_unknown_style_is_refused(style: str) -> None:
    with pytest.raises(
        ParallelPlanError, match=f"'up': '{style}' is no style; column, row, vocabulary, .*column/3"
    ):
        read_patterns(Perceptron(), {"up": style})


def test_a_pattern_that_matches_nothing_is_refused_with_the_name_that_is_near() -> None:
    with pytest.raises(ParallelPlanError, match="'dwon' matches no module of Perceptron; it has 'down'"):
        plan_model(Perceptron(), 2, {"up": "column", "dwon": "row"})


def test_patterns_name_nothing_of_a_model_that_is_a_layer() -> None:
    plan = plan_model(nn.Linear(2, 2), 2, {"up": "column", "*": "whole"})
    assert plan.layers == ()


def test_a_pattern_is_no_regular_expression() -> None:
    with pytest.raises(ParallelPlanError, match=r"'u\.' matches no module"):
        read_patterns(Perceptron(), {"u.": "column"})


def test_a_column_without_a_row_is_refused() -> None:
    with pytest.raises(ParallelPlanError, match="up has style 'column', and no layer after it has 'row'"):
        plan_model(Perceptron(), 2, {"up": "column"})


def test_a_row_without_a_column_is_refused() -> None:
    with pytest.raises(ParallelPlanError, match="down has style 'row', and no layer before it has 'column'"):
        plan_model(Perceptron(), 2, {"down": "row"})


@pytest.mark.parametrize(
    ("styles", "message"),
    [
        (
            {"words": "column"},
            "words: 'column' is for a Linear or .* in floating point, not for a .*Embedding",
        ),
        (
            {"head": "vocabulary"},
            "head: 'vocabulary' is for an Embedding in floating point, not for a .*Linear",
        ),
        (
            {"inner.between": "gathered_column"},
            "inner.between: 'gathered_column' is for .*, not for a .*GELU",
        ),
    ],
)
def test_a_style_for_another_kind_of_layer_is_refused(styles: dict[str, str], message: str) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        plan_model(Words(), 2, styles)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_whose_rows_depend_on_each_other_is_refused(option: dict[str, object]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(
        ParallelPlanError, match=f"words has {name}={value}, which rows on several ranks do not allow"
    ):
        plan_model(Words(**option), 2, {"words": "vocabulary"})


def test_fewer_outputs_than_ranks_are_refused() -> None:
    with pytest.raises(ParallelPlanError, match="head has 9 outputs, fewer than the 10 ranks"):
        plan_model(Words(), 10, {"head": "gathered_column"})


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("padding", [None, 3, -1])
def test_an_embedding_and_a_head_are_divided(size: int, padding: int | None) -> None:
    styles = {"words": "vocabulary", "head": "gathered_column", "*.up": "column", "*.down": "row"}
    names = divided_alike(Words(padding_idx=padding), size, [TOKENS], styles)
    assert names == ["words", "inner.up", "inner.down", "head"]


def test_an_embedding_and_a_head_that_are_tied_are_divided_alike() -> None:
    model = with_random_values(Words())
    model.head.weight = model.words.weight
    plan = plan_model(model, 2, {"words": "vocabulary", "head": "gathered_column"})
    assert_same(model, [TOKENS], plan)


def test_a_tie_of_which_one_layer_is_divided_is_refused() -> None:
    model = Words()
    model.head.weight = model.words.weight
    with pytest.raises(
        ParallelPlanError, match=r"head\.weight and words\.weight are one parameter, of which only"
    ):
        plan_model(model, 2, {"words": "vocabulary"})


def test_a_tie_that_is_divided_in_two_ways_is_refused() -> None:
    model = nn.Sequential(Perceptron(hidden=WIDTH), Perceptron(hidden=WIDTH))
    model[1].down.weight = model[0].up.weight
    with pytest.raises(
        ParallelPlanError, match=r"1\.down\.weight and 0\.up\.weight are one parameter.*in two ways"
    ):
        plan_model(model, 2, {"*.up": "column", "*.down": "row"})


def test_whole_layers_stay_on_every_rank() -> None:
    model = nn.Sequential(Perceptron(), Perceptron())
    assert divided_alike(model, 2, INPUTS, {"0.*": "whole"}) == ["1.up", "1.down"]
    assert plan_model(model, 2, {"*": "whole"}).layers == ()


def test_pieces_are_those_that_are_said() -> None:
    model = with_random_values(Block())
    plan = plan_model(model, 2, {"qkv": "column/3", "attended": "row"})
    (layer,) = [one for one in plan.layers if one.name == "qkv"]
    assert layer.cuts["weight"] == Cut(dim=0, pieces=(WIDTH,) * 3, num_units=4)
    assert plan.sources == {"qkv": "given", "attended": "given", "up": "found", "down": "found"}
    assert_same(model, INPUTS, plan)
    with pytest.raises(
        ParallelPlanError, match="qkv of 48 outputs and attended of 16 inputs cannot be divided"
    ):
        plan_model(model, 2, {"qkv": "column/2", "attended": "row"})


def test_given_styles_are_tried() -> None:
    match = "up of 32 outputs and down of 32 inputs cannot be divided among 2 ranks: .*; give '.*' the style 'whole'"
    with pytest.raises(ParallelPlanError, match=match):
        plan_model(Perceptron(nn.LayerNorm(32)), 2, {"up": "column", "down": "row"})


def test_more_ranks_than_heads_are_refused_with_the_numbers_that_may_do() -> None:
    with pytest.raises(
        ParallelPlanError,
        match=r"value of 16, 16, 16 outputs .* among 5 ranks: .*; tensor=2 or 3 or 4 may do",
    ):
        plan_model(nn.Sequential(Attention(counts=False)), 5, HEADS)


def test_a_norm_of_each_head_is_summed_once_whether_it_is_said_or_found() -> None:
    model = with_random_values(nn.Sequential(Attention(norm=nn.LayerNorm(4))))
    for more in ({}, {"*.norm": "summed"}):
        plan = plan_model(model, 2, HEADS | more)
        assert [one.style for one in plan.layers if one.name == "0.norm"] == ["summed"]
        assert_same(model, INPUTS, plan)


def test_a_number_of_heads_that_cannot_be_tried_is_refused() -> None:
    """With half as many features, four heads would be half as wide, and nothing would fail."""
    with pytest.raises(
        ParallelPlanError, match=r"inner\.num_heads may have to change .* does not run on one tensor"
    ):
        plan_model(Conditioned(ConditionedAttention()), 2, HEADS)


def test_the_pieces_of_a_fused_layer_that_cannot_be_tried_are_to_be_said() -> None:
    """A contiguous part of query, key and value would be all queries on the first rank, and nothing would fail."""
    model = with_random_values(Conditioned(FusedAttention()))
    styles = {"*.qkv": "column", "*.output": "row"}
    with pytest.raises(
        ParallelPlanError, match=r"inner\.qkv may be of 3 pieces.*'column/3' if.*or 'column/1'"
    ):
        plan_model(model, 2, styles)
    assert_same(model, INPUTS, plan_model(model, 2, styles | {"*.qkv": "column/3"}))


@pytest.mark.parametrize("style", ["summed", "whole"])
def test_values_inside_a_region_that_cannot_be_tried_want_a_style(style: str) -> None:
    attention = ConditionedAttention(counts=False, norm=nn.LayerNorm(4))
    del attention.num_heads
    model = with_random_values(Conditioned(attention))
    attention.config = SimpleNamespace(num_attention_heads=4)
    with pytest.raises(
        ParallelPlanError, match=r"inner\.norm has values of its own \(weight, bias\).*'summed' if"
    ):
        plan_model(model, 2, HEADS)
    plan = plan_model(model, 2, HEADS | {"*.norm": style})
    if style == "summed":
        assert_same(model, INPUTS, plan)
    else:
        with pytest.raises(AssertionError, match=r"gradient of inner\.norm"):
            assert_same(model, INPUTS, plan)


def test_the_models_own_plan_is_read_by_the_numbers_of_its_layers() -> None:
    styles, left = read_library_plan(Planned({"layers.*.up": "colwise", "layers.*.down": "rowwise"}))
    assert styles == {
        f"layers.{index}.{name}": GivenStyle(style)
        for index in range(2)
        for name, style in (("up", "column"), ("down", "row"))
    }
    assert left == {}


def test_what_of_the_models_own_plan_is_left_has_a_reason() -> None:
    styles, left = read_library_plan(
        Planned({"conv": "colwise", "layers.0.up": "ep_router", "norm": "replicated_with_grad_allreduce"})
    )
    assert styles == {"norm": GivenStyle("summed")}
    assert left["conv"] == "a Conv1d cannot be divided"
    assert left["layers.0.up"].startswith("the model's style 'ep_router' is not one of colwise, rowwise")


def test_a_layer_that_shares_a_parameter_with_one_of_no_style_is_left() -> None:
    model = Planned({"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    model.layers[0].between.weight = model.layers[0].up.weight
    styles, left = read_library_plan(model)
    assert "layers.0.up" not in styles
    assert left["layers.0.up"] == "it shares a parameter with a layer that cannot be divided"


def test_a_model_without_a_plan_brings_none() -> None:
    assert read_library_plan(Perceptron()) == ({}, {})
