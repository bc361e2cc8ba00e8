import re
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_precision import (
    LayerFilter,
    PrecisionError,
    TorchaoRecipe,
    TransformerEngineRecipe,
    convert_model,
)
from optional_modules import skip_without

skip_without("torchao")  # an extra of drivetrain-precision brings it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)


def net() -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(32, 32), "a": Block(), "b": Block(), "head": nn.Linear(32, 96)})


def converted(layers: LayerFilter) -> tuple[str, ...]:
    return convert_model(net(), TorchaoRecipe(layers=layers)).converted


def reasons(layers: LayerFilter) -> dict[str, str]:
    report = convert_model(net(), TorchaoRecipe(), filter=layers)
    return {each.name: each.reason for each in report.layers}


BLOCKS = tuple(f"{block}.{layer}" for block in "ab" for layer in ("router", "up", "down"))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (LayerFilter(), BLOCKS),
        (LayerFilter(skip_first=False), ("first", *BLOCKS)),
        (LayerFilter(skip_last=False), (*BLOCKS, "head")),
        (LayerFilter(include=("a.*",)), BLOCKS[:3]),
        (LayerFilter(include=("a.up", "*.down")), ("a.up", "a.down", "b.down")),
        (LayerFilter(exclude=("*.router", "b.*")), ("a.up", "a.down")),
        (LayerFilter(inside=(Block,)), BLOCKS),
        (LayerFilter(min_features=33, skip_last=False, accept=None, include=("*",)), ()),
        (LayerFilter(accept=lambda name, layer: layer.out_features == 64), ("a.up", "b.up")),
        (LayerFilter(accept=lambda name, layer: name.startswith("b")), BLOCKS[3:]),
    ],
)
def test_all_conditions_must_hold(layers: LayerFilter, expected: tuple[str, ...]) -> None:
    if expected:
        assert converted(layers) == expected
    else:
        with pytest.raises(PrecisionError, match="has 32 features, less than min_features=33"):
            converted(layers)


def test_each_condition_has_a_reason_of_its_own() -> None:
    assert reasons(LayerFilter())["first"] == "is the first linear layer (skip_first)"
    assert reasons(LayerFilter())["head"] == "is the last linear layer (skip_last)"
    assert reasons(LayerFilter(include=("a.*",)))["b.up"] == "no pattern of include=('a.*',) matches"
    assert reasons(LayerFilter(exclude=("*.router",)))["a.router"] == "exclude='*.router' matches"
    assert reasons(LayerFilter(inside=(Block,)))["head"] == "is in none of inside=('Block',)"
    assert reasons(LayerFilter(accept=lambda name, _: name == "a.up"))["b.up"] == "accept returned False"


@pytest.mark.parametrize("field", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(field: str) -> None:
    model = net()
    layers = LayerFilter(**{field: ("*.rooter",)})
    match = rf"LayerFilter\({field}='\*\.rooter'\) matches none of the 8 linear layers; .*'a\.router'"
    with pytest.raises(PrecisionError, match=match):
        convert_model(model, TorchaoRecipe(), filter=layers)
    assert all(type(layer) in (nn.Linear, Block, nn.ModuleDict) for layer in model.modules())


def test_a_filter_given_with_the_model_comes_before_that_of_the_recipe() -> None:
    recipe = TorchaoRecipe(layers=LayerFilter(include=("a.*",)))
    assert convert_model(net(), recipe, LayerFilter(include=("b.up",))).converted == ("b.up",)
    assert torch.is_grad_enabled()


def test_a_pattern_may_match_in_another_model_of_the_run() -> None:
    layers = LayerFilter(exclude=("*.critic",))
    report = convert_model(net(), TorchaoRecipe(layers=layers), known=("value.critic",))
    assert report.converted == BLOCKS
    with pytest.raises(PrecisionError, match=r"exclude='\*\.critic'\) matches none of the 9 linear layers"):
        convert_model(net(), TorchaoRecipe(layers=layers), known=("actor",))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"exclude": "ab"}, r"exclude='ab': must be a tuple of patterns"),
        ({"include": ("*", 3)}, r"include=\('\*', 3\): must be a tuple of patterns"),
        ({"inside": ("Block",)}, r"inside=\('Block',\): must be a tuple of classes of modules"),
        ({"inside": Block}, r"inside=<class .*: must be a tuple of classes of modules"),
        ({"min_features": "64"}, r"min_features='64': must be an integer from 0 on"),
        ({"min_features": -1}, r"min_features=-1: must be an integer from 0 on"),
        ({"skip_first": "no"}, r"skip_first='no': must be True or False"),
        ({"accept": "a"}, r"accept='a': must be a function"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_is_allowed(fields: dict[str, Any], match: str) -> None:
    kind: Any = LayerFilter
    with pytest.raises(PrecisionError, match=match):
        kind(**fields)


def _accepts(name: str, layer: nn.Module) -> bool:
    return True


@pytest.mark.parametrize("kind", [TorchaoRecipe, TransformerEngineRecipe])
def test_a_recipe_takes_a_filter_alone(kind: Any) -> None:
    with pytest.raises(
        PrecisionError, match=r"layers=<function.*: must be a LayerFilter, as in LayerFilter\(accept="
    ):
        kind(layers=_accepts)
    with pytest.raises(PrecisionError, match=r"layers=\('a',\): must be a LayerFilter$"):
        kind(layers=("a",))


def test_options_of_a_recipe_of_another_kind_are_refused() -> None:
    given: Any = "fp8"
    with pytest.raises(PrecisionError, match="all_gather='fp8': must be True or False"):
        TorchaoRecipe(all_gather=given)
    with pytest.raises(PrecisionError, match="options='fp8': must be a mapping"):
        TransformerEngineRecipe(options=given)


@pytest.mark.parametrize(("pattern", "meant"), [("router", "*.router"), ("a", "a.*"), ("oute", "*oute*")])
def test_a_pattern_that_matches_nothing_is_told_with_one_that_would(pattern: str, meant: str) -> None:
    with pytest.raises(PrecisionError, match=rf"; {re.escape(repr(meant))} matches \d of them$"):
        convert_model(net(), TorchaoRecipe(layers=LayerFilter(exclude=(pattern,))))
