"""Models that no recipe can convert, or none on this device: the error says which layers, and what would help."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_precision import (
    LayerFilter,
    NothingConvertedError,
    PrecisionError,
    TorchaoRecipe,
    convert_model,
)

NVFP4 = TorchaoRecipe(scaling="nvfp4", layers=LayerFilter(skip_first=False, skip_last=False))


class Conv1D(nn.Module):
    """A layer like GPT-2's, whose weight has the shape (in_features, out_features)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 32))


def gpt() -> nn.Module:
    table, head = nn.Embedding(32, 32), nn.Linear(32, 32, bias=False)
    head.weight = table.weight
    return nn.ModuleDict({"table": table, "a": Conv1D(), "b": Conv1D(), "head": head})


def test_layers_of_other_classes_are_named_before_the_reasons_of_linear_ones() -> None:
    match = (
        r"2 modules of class Conv1D are not nn\.Linear; head shares its weight .* No LayerFilter changes that"
    )
    with pytest.raises(NothingConvertedError, match=match):
        convert_model(gpt(), "torchao_tensorwise")
    model = nn.Sequential(Conv1D(), nn.Linear(7, 7))
    with pytest.raises(
        NothingConvertedError, match=r": 1 module of class Conv1D is not nn\.Linear; 1 has in_feat"
    ):
        convert_model(model, "torchao_tensorwise")


@pytest.mark.parametrize("layers", [LayerFilter(), LayerFilter(min_features=64, skip_first=False)])
def test_a_filter_is_advised_where_one_would_help(layers: LayerFilter) -> None:
    with pytest.raises(NothingConvertedError, match=r"Give LayerFilter what to convert \(skip_first=False"):
        convert_model(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), TorchaoRecipe(layers=layers))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the model could be moved to the accelerator")
@pytest.mark.parametrize("options", [{}, {"device": torch.device("cpu")}])
def test_a_recipe_that_the_device_cannot_run_is_refused_before_a_layer_changes(options: Any) -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    with pytest.raises(
        PrecisionError, match=r"recipe torchao_nvfp4: it needs a Blackwell or newer GPU, .* cpu"
    ):
        convert_model(model, NVFP4, **options)
    assert type(model[0]) is nn.Linear


def test_a_model_without_memory_may_be_built_for_another_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 128))
    assert convert_model(model, NVFP4).converted == ("0",)
    with pytest.raises(PrecisionError, match="needs a Blackwell or newer GPU, and the device is cpu"):
        convert_model(nn.Sequential(nn.Linear(128, 128, device="meta")), NVFP4, device=torch.device("cpu"))
