"""Models that bitsandbytes quantises."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain_accelerate.models import quantized
from drivetrain_accelerate.models.load_weights import init_empty_weights
from drivetrain_accelerate.plugins.quantization_config import BnbQuantizationConfig
from optional_modules import skip_without

skip_without("bitsandbytes")


config_of = partial(
    BnbQuantizationConfig,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.float32,
    torch_dtype=torch.float32,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.fixture
def plain() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("loaded", [True, False])
def test_a_model_is_quantised_while_it_is_loaded_or_in_memory(
    plain: Model, bits: int, loaded: bool, tmp_path: Path
) -> None:
    config = config_of(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
    x = torch.randn(3, 64)
    expected = plain(x)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = Model()
    model = quantized.load_and_quantize_model(
        empty if loaded else plain, config, tmp_path if loaded else None, device_map={"": "cpu"}
    ).eval()
    assert type(model.body[0]).__name__ == {8: "Linear8bitLt", 4: "Linear4bit"}[bits]
    assert type(model.head) is nn.Linear  # the output head stays
    assert quantized.has_4bit_bnb_layers(model) == (bits == 4)
    assert (model(x) - expected).abs().max() < 0.3 * expected.abs().max()
    assert model.hf_device_map == {"": "cpu"}


def test_a_model_without_memory_needs_weights() -> None:
    with init_empty_weights():
        model = Model()
    with pytest.raises(ValueError, match="give weights_location"):
        quantized.load_and_quantize_model(model, config_of(load_in_4bit=True))


def test_layers_are_replaced_but_for_those_named(plain: Model) -> None:
    theirs: Any = pytest.importorskip("accelerate.utils.bnb")
    assert quantized.get_keys_to_not_convert(plain) == theirs.get_keys_to_not_convert(plain)
    quantized.replace_with_bnb_layers(plain, config_of(load_in_4bit=True), ["head", "0"])
    assert [type(each).__name__ for each in (plain.body[0], plain.body[2], plain.head)] == [
        "Linear", "Linear4bit", "Linear",
    ]  # fmt: skip
    assert quantized.get_parameter_device(plain) == torch.device("cpu")


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_replaced_layer_packs_its_weight_as_the_options_say(plain: Model, kind: str, double: bool) -> None:
    config = config_of(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double)
    layer: Any = quantized.replace_with_bnb_layers(plain, config).body[0].to("cpu")
    assert (layer.weight.quant_state.quant_type, layer.weight.quant_state.nested) == (kind, double)
    assert not any(each.requires_grad for each in layer.parameters())


def test_a_map_is_planned_by_packed_sizes(plain: Model) -> None:
    config = config_of(load_in_4bit=True)
    budgets: Any = {"cpu": 60_000}
    assert quantized.get_quantized_model_device_map(plain, config, "sequential", budgets) == {"": "cpu"}
    assert quantized.get_quantized_model_device_map(plain, config, {"": "cpu"}) == {"": "cpu"}
    assert set(quantized.get_quantized_model_device_map(plain, config)) == {""}
    with pytest.raises(ValueError, match="device_map='other': give a map, or one of 'auto'"):
        quantized.get_quantized_model_device_map(plain, config, "other")
