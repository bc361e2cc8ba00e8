import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig

from drivetrain_precision import (
    LayerFilter,
    PrecisionError,
    PrecisionSettings,
    TorchaoRecipe,
    choose_policy,
    convert_model,
    load_recipe,
    recipe_names,
    restore_model,
)
from drivetrain_precision.fp8.registry import choose_recipe

CPU = torch.device("cpu")


def test_the_recipes_of_torchao_are_registered_by_their_names() -> None:
    own = [name for name in recipe_names() if name.startswith("torchao_")]
    assert own == [
        "torchao_mxfp8",
        "torchao_mxfp8_with_gw_hp",
        "torchao_nvfp4",
        "torchao_rowwise",
        "torchao_rowwise_with_gw_hp",
        "torchao_tensorwise",
    ]
    assert [load_recipe(name).name for name in own] == own
    assert load_recipe("torchao_rowwise") == TorchaoRecipe(scaling="rowwise")


def test_an_unknown_name_lists_all() -> None:
    with pytest.raises(
        PrecisionError, match=r"fp8_recipe='te_fast': there is no such recipe; there are .*torchao_rowwise"
    ):
        load_recipe("te_fast")


def install(folder: Path, name: str, code: str, **recipes: str) -> None:
    """Write a distribution of one module that registers recipes, each by the name of a function."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = "\n".join(f"{recipe} = {name}:{function}" for recipe, function in recipes.items())
    (info / "entry_points.txt").write_text(f"[drivetrain.fp8_recipes]\n{points}\n")


def test_a_package_brings_a_recipe_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def fast():\n    return TorchaoRecipe(round_scales=True)\n"
    install(tmp_path, "fast_fp8", f"from drivetrain_precision import TorchaoRecipe\n\n{code}", fast="fast")
    monkeypatch.syspath_prepend(tmp_path)
    assert "fast" in recipe_names()
    assert load_recipe("fast") == TorchaoRecipe(round_scales=True)


def test_auto_on_a_cpu_takes_the_cheapest_emulation() -> None:
    choice = choose_recipe(CPU, PrecisionSettings())
    assert choice.recipe == TorchaoRecipe(scaling="tensorwise")
    assert choice.reason.startswith("torchao_tensorwise: a CPU computes it by products in fp32")


UNITS = """
from dataclasses import dataclass
from pathlib import Path
from drivetrain_precision import Support, TorchaoRecipe

@dataclass(frozen=True, kw_only=True)
class Native(TorchaoRecipe):
    claimed: str = ""

    @property
    def name(self):
        return self.claimed

    def support(self, device):
        with Path(__file__).with_suffix(".asked").open("a") as asked:
            asked.write(self.claimed + " ")
        return Support(level="native", reason="it has units")

def block():
    return Native(claimed="te_block")

def rowwise():
    return Native(claimed="torchao_rowwise")
"""


def test_auto_takes_torchaos_best_and_asks_each_recipe_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "units", UNITS, te_block="block", torchao_rowwise="rowwise")
    monkeypatch.syspath_prepend(tmp_path)
    choice = choose_recipe(CPU, PrecisionSettings())
    assert choice.reason == "torchao_rowwise: it has units"
    assert sorted((tmp_path / "units.asked").read_text().split()) == ["te_block", "torchao_rowwise"]


def test_the_settings_say_which_layers_stay() -> None:
    settings = PrecisionSettings(fp8_recipe="torchao_rowwise", fp8_exclude=("*.router",), fp8_skip_ends=False)
    recipe = choose_recipe(CPU, settings).recipe
    layers = LayerFilter(exclude=("*.router",), skip_first=False, skip_last=False)
    assert recipe == TorchaoRecipe(scaling="rowwise", layers=layers)


def test_a_recipe_that_cannot_run_here_names_the_nearest_that_can() -> None:
    choice = choose_recipe(CPU, PrecisionSettings(fp8_recipe="torchao_nvfp4"))
    assert choice.recipe is None
    assert choice.reason == (
        "recipe 'torchao_nvfp4': it needs a Blackwell or newer GPU, and the device is cpu; the nearest that runs "
        "here is 'torchao_mxfp8'; fp8_fallback='bf16' trains in bf16 instead"
    )


def test_where_no_recipe_runs_auto_says_of_each_why() -> None:
    choice = choose_recipe(torch.device("mps"), PrecisionSettings())
    assert choice.recipe is None
    assert choice.reason.startswith("no recipe runs here (")
    for name in recipe_names():
        assert f"{name}: " in choice.reason


def test_settings_that_a_recipe_given_in_code_would_leave_unheard_are_an_error() -> None:
    given = TorchaoRecipe(scaling="rowwise")
    assert choose_recipe(CPU, PrecisionSettings(fp8_recipe=given.name), given).recipe == given
    with pytest.raises(PrecisionError, match=r"fp8_recipe='torchao_mxfp8', and .*'torchao_rowwise' is given"):
        choose_recipe(CPU, PrecisionSettings(fp8_recipe="torchao_mxfp8"), given)
    excludes, ends = PrecisionSettings(fp8_exclude=("*.up",)), PrecisionSettings(fp8_skip_ends=False)
    with pytest.raises(
        PrecisionError, match=r"fp8_exclude=\('\*\.up',\): .*LayerFilter\(exclude=\('\*\.up',\)\) of"
    ):
        choose_recipe(CPU, excludes, given)
    with pytest.raises(
        PrecisionError, match=r"^precision\.fp8_skip_ends=False: .*\(skip_first=False, skip_last=False\)"
    ):
        choose_recipe(CPU, ends, given)


@pytest.mark.parametrize("name", ["te_mxfp8", "te_nvfp4", "torchao_nvfp4"])
@pytest.mark.default_cases("torchao_nvfp4")
def test_what_hardware_cannot_run_is_told_before_a_library_to_build(name: str) -> None:
    reason = choose_recipe(CPU, PrecisionSettings(fp8_recipe=name)).reason
    assert reason.startswith(f"recipe {name!r}: it needs a Blackwell or newer GPU, and the device is cpu; ")
    assert "the nearest that runs here is 'torchao_mxfp8'" in reason


def test_a_recipe_may_be_given_by_its_name_with_the_settings_of_the_section() -> None:
    policy = choose_policy("fp8", CPU, PrecisionSettings(fp8_exclude=("*.up",)), recipe="torchao_rowwise")
    assert policy.recipe == TorchaoRecipe(scaling="rowwise", layers=LayerFilter(exclude=("*.up",)))
    assert choose_policy("fp8", CPU, recipe="auto").recipe == TorchaoRecipe()
    with pytest.raises(
        PrecisionError, match=r"precision\.fp8_recipe='torchao_mxfp8', and fp8_recipe='torchao_rowwise'"
    ):
        choose_policy("fp8", CPU, PrecisionSettings(fp8_recipe="torchao_mxfp8"), recipe="torchao_rowwise")
    for recipe in ("torchao_rowwise", TorchaoRecipe(scaling="rowwise")):
        with pytest.raises(
            PrecisionError, match="fp8_recipe='torchao_rowwise' with mixed_precision='bf16': say"
        ):
            choose_policy("bf16", CPU, recipe=recipe)
    with pytest.raises(
        PrecisionError, match=r"fp8_recipe='rowwise': there is no such recipe; .*torchao_rowwise"
    ):
        choose_policy("fp8", CPU, recipe="rowwise")


def test_a_model_is_converted_and_restored_by_the_name_of_a_recipe() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    assert convert_model(model, "torchao_rowwise").recipe == "torchao_rowwise"
    assert restore_model(model, "torchao_rowwise") == ("1",)
    with pytest.raises(
        PrecisionError, match="'auto' is a choice of settings, by device; the recipes are te_block"
    ):
        convert_model(model, "auto")


NO_RECIPES: tuple[Any, ...] = (Float8LinearConfig(), TorchaoRecipe, 8, nn.Linear)


@pytest.mark.parametrize("given", NO_RECIPES)
def test_what_is_no_recipe_is_refused_with_what_was_given_and_the_names(given: Any) -> None:
    hint = (
        r"a class; give an object, such as TorchaoRecipe\(\)"
        if repr(given) == repr(TorchaoRecipe)
        else "no recipe of fp8; give"
    )
    match = rf"^{re.escape(repr(given))} is {hint}.*load_recipe\('torchao_rowwise'\).*torchao_tensorwise"
    with pytest.raises(PrecisionError, match=match):
        convert_model(nn.Linear(32, 32), given)
    with pytest.raises(PrecisionError, match=match):
        choose_policy("fp8", CPU, recipe=given)
    with pytest.raises(PrecisionError, match=match):
        choose_policy("bf16", CPU, recipe=given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(TorchaoRecipe):
    pass


def test_a_recipe_of_a_class_of_ones_own_is_taken_as_it_is() -> None:
    given = replace(Named(), scaling="mxfp8")
    assert choose_recipe(CPU, PrecisionSettings(), given).recipe is given
