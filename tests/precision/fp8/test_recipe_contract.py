"""Every recipe of torchao passes the contract that recipes of other packages can run."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn

from drivetrain_precision import (
    Fp8Recipe,
    NothingConvertedError,
    RecipeContract,
    TorchaoRecipe,
    load_recipe,
    recipe_names,
)
from optional_modules import skip_without

skip_without("torchao")  # an extra of drivetrain-precision brings it


def contract(recipe: Any, **attributes: Any) -> RecipeContract:
    class Contract(RecipeContract):
        def make(self) -> Fp8Recipe:
            return recipe

    made = Contract()
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize(
    "recipe",
    [
        *(load_recipe(name) for name in recipe_names() if name.startswith("torchao")),
        TorchaoRecipe(round_scales=True),
        TorchaoRecipe(all_gather=True),
    ],
    ids=repr,
)
def test_every_recipe_of_torchao_passes_the_contract(recipe: Fp8Recipe) -> None:
    assert len(contract(recipe).check_all()) == 10


@dataclass(frozen=True, kw_only=True)
class Wrong(TorchaoRecipe):
    """A recipe with one fault."""

    fault: str

    def refusal(self, module: nn.Module) -> str | None:
        return "is odd" if self.fault == "vague" else super().refusal(module)

    def convert(self, module: nn.Module) -> nn.Module:
        converted = cast("Any", super().convert(module))
        if self.fault == "rounds":
            converted.weight.data = converted.weight.data.bfloat16().float()
        if self.fault == "exchanges":
            converted.weight = nn.Parameter(converted.weight.detach().clone(), requires_grad=False)
        if self.fault == "adds":
            converted.register_buffer("scale", torch.ones(1))
        return converted

    def restore(self, module: nn.Module) -> nn.Module:
        return module if self.fault == "stays" else super().restore(module)

    def is_converted(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) if self.fault == "guesses" else super().is_converted(module)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("vague", "up is odd; down is odd"),
        ("rounds", r"after convert: up\.weight is not bit for bit"),
        ("exchanges", r"convert exchanged the parameter up\.weight"),
        ("adds", "after convert: the state has the names"),
        ("stays", "restore must return nn.Linear, not BlockedFloat8Linear"),
        ("guesses", "is_converted says yes of a plain Linear"),
    ],
)
def test_a_fault_of_a_recipe_is_found(fault: str, told: str) -> None:
    with pytest.raises((AssertionError, NothingConvertedError), match=told):
        contract(Wrong(fault=fault)).check_all()
