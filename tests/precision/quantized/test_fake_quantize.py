"""`prepare_qat`: which layers round, that they stay the objects they were, and what it refuses."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn

from drivetrain_precision import LayerFilter, PrecisionError, QuantizedScheme, prepare_qat, undo_qat


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(48, 64), nn.Linear(64, 4))


def test_layers_round_in_place_and_keep_parameters_names_and_hooks() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    layer, weight = model[0], model[0].weight
    called: list[bool] = []

    def note(*_: object) -> None:
        called.append(True)

    layer.register_forward_hook(note)
    x = torch.randn(2, 64)
    plain = model(x)
    names = list(model.state_dict())
    prepare_qat(model, QuantizedScheme(), LayerFilter(skip_first=False, skip_last=False))
    assert model[0] is layer
    assert model[0].weight is weight
    assert list(model.state_dict()) == names
    rounded = model(x)
    assert 0 < (rounded - plain).abs().max() < 0.3
    rounded.sum().backward()
    assert weight.grad is not None
    assert len(called) == 2
    assert torch.equal(copy.deepcopy(model)(x), rounded)


def test_the_report_tells_why_a_layer_stays_as_it_is() -> None:
    report = prepare_qat(net(), QuantizedScheme())
    assert report.prepared == ("0",)
    assert [each.reason for each in report.layers[1:]] == [
        "has in_features=48, which is not divisible by group_size=32",
        "is the last linear layer (skip_last)",
    ]
    assert str(report).startswith("1 of 3 layers train for QuantizedScheme(weight_bits=4, group_size=32")


def test_nothing_to_quantise_is_an_error_that_leaves_the_model_plain() -> None:
    model = net()
    with pytest.raises(
        PrecisionError, match=r"no layer of Sequential can be quantised: 0 has in_features=64"
    ):
        prepare_qat(model, QuantizedScheme(group_size=128))
    with pytest.raises(PrecisionError, match=r"include='wrong'\) matches none of the 3 linear layers"):
        prepare_qat(model, QuantizedScheme(), LayerFilter(include=("wrong",)))
    assert all(type(each) is nn.Linear for each in model)


def test_layers_that_round_already_or_hold_quantised_weights_are_refused() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = net()
    prepare_qat(model, QuantizedScheme())
    with pytest.raises(PrecisionError, match=r"0 rounds its weight already .*undo_qat\(model\) first"):
        prepare_qat(model, QuantizedScheme(weight_bits=8))
    quantised = net()
    quantize_(quantised, Int8WeightOnlyConfig())
    with pytest.raises(PrecisionError, match="holds a Int8Tensor as its weight: quantised"):
        prepare_qat(quantised, QuantizedScheme())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_bits": 2}, "weight_bits=2: must be 4 or 8"),
        ({"activations": "int4"}, "activations='int4': must be 'int8' or 'full'"),
        ({"group_size": 16}, "group_size=16: must be an even number from 32 on"),
    ],
)
def test_schemes_that_do_not_exist_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        QuantizedScheme(**fields)


def test_with_adapters_the_head_is_not_quantised() -> None:
    from peft import LoraConfig, get_peft_model

    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = get_peft_model(layers, LoraConfig(r=4, target_modules=["0", "1"]))
    report = prepare_qat(model, QuantizedScheme())
    assert report.prepared == ("base_model.model.0.base_layer",)


def test_a_preparation_that_fails_half_way_leaves_the_model_plain() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    # What makes the layer that rounds asks for the sizes of this one.
    del model[1].out_features
    with pytest.raises(AttributeError, match="out_features"):
        prepare_qat(model, QuantizedScheme())
    assert [type(each) for each in model] == [nn.Linear] * 3
    model[1].out_features = 64
    assert prepare_qat(model, QuantizedScheme()).prepared == ("0", "1")


def test_a_compiled_model_rounds_under_the_names_of_the_plain_one() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    compiled = cast("nn.Module", torch.compile(model, backend="eager"))
    layers = LayerFilter(include=("0",), skip_first=False)
    assert prepare_qat(compiled, QuantizedScheme(), layers).prepared == ("0",)
    assert undo_qat(compiled) == ("0",)
    assert type(model[0]) is nn.Linear
