"""What is exported after quantisation-aware training computes what the training computed, wherever it is loaded."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain_precision import (
    LayerFilter,
    PrecisionError,
    QuantizedScheme,
    TorchaoRecipe,
    convert_model,
    export_quantized,
    load_quantized,
    prepare_qat,
    undo_qat,
)
from drivetrain_precision.quantized.export import quantized_state

SCHEMES = {
    "int8 activations, int4 weights": QuantizedScheme(),
    "int8 activations, int8 weights": QuantizedScheme(weight_bits=8, group_size=None),
    "int4 weights": QuantizedScheme(activations="full"),
    "int8 weights": QuantizedScheme(weight_bits=8, group_size=None, activations="full"),
}


class Net(nn.Module):
    """Maps (batch, 64) to (batch, 8); its scale is a parameter of its own, and two names share an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.table = nn.Embedding(16, 64)
        self.blocks = nn.Sequential(
            nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False), nn.BatchNorm1d(64)
        )
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x * self.scale))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def trained(scheme: QuantizedScheme) -> Net:
    model = net()
    assert prepare_qat(model, scheme).prepared == ("blocks.0", "blocks.2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    return model.eval()


@pytest.mark.parametrize("name", SCHEMES)
def test_the_export_computes_what_training_computed_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, x = trained(SCHEMES[name]), torch.randn(5, 64)
    expected = model(x)
    export_quantized(model, tmp_path)
    with torch.device("meta"):
        found = Net().eval()
    load_quantized(found, tmp_path)
    assert torch.equal(found(x), expected)
    assert type(found.blocks[0].weight.data).__name__ == "IntxUnpackedToInt8Tensor"
    assert found.head.weight is found.table.weight
    assert not any(each.requires_grad for each in found.parameters())
    assert torch.equal(model(x), expected)  # it is as before, and training can go on


def test_the_export_has_the_state_of_a_plain_model_with_quantised_weights() -> None:
    model = trained(QuantizedScheme())
    state = quantized_state(model)
    assert state.keys() == net().state_dict().keys() - {"head.weight"}
    assert torch.equal(state["scale"], model.scale)


def test_undoing_gives_plain_layers_with_the_same_weights() -> None:
    model = trained(QuantizedScheme())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert undo_qat(model) == ("blocks.0", "blocks.2")
    assert [type(each) for each in model.modules()] == [type(each) for each in net().modules()]
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    with pytest.raises(PrecisionError, match="no layer of Net was prepared by prepare_qat"):
        quantized_state(model)


def test_transformers_loads_the_export(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    layers = LayerFilter(skip_first=False, exclude=("*.o_proj",))
    report = prepare_qat(model, QuantizedScheme(), layers)
    assert len(report.prepared) == 6
    tokens = torch.arange(12)[None]
    expected = model(tokens).logits
    export_quantized(model, tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(found(tokens).logits, expected)
    kind = type(found.model.layers[0].self_attn.q_proj.weight.data).__name__
    assert kind == "IntxUnpackedToInt8Tensor"
    assert type(found.model.layers[0].self_attn.o_proj.weight.data) is torch.Tensor
    assert json.loads(Path(tmp_path, "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_what_cannot_be_exported_or_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match=r"load_quantized loads into a plain model: build a new one"):
        load_quantized(trained(QuantizedScheme()), tmp_path)
    single = nn.Linear(64, 64)
    prepare_qat(single, QuantizedScheme(), LayerFilter(skip_first=False, skip_last=False))
    with pytest.raises(PrecisionError, match=r"single linear layer: put it into an nn\.Sequential"):
        export_quantized(single, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_leaves_the_earlier_one_alone_and_others_may_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o022)
    try:
        path = export_quantized(trained(QuantizedScheme()), tmp_path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    content = path.read_bytes()

    def fail(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        export_quantized(trained(QuantizedScheme()), tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == content


def test_an_export_is_not_loaded_into_layers_that_compute_in_fp8(tmp_path: Path) -> None:
    export_quantized(trained(QuantizedScheme()), tmp_path)
    model = net()
    convert_model(model, TorchaoRecipe(layers=LayerFilter(skip_first=False)))
    with pytest.raises(
        PrecisionError, match=r"blocks\.0 computes in fp8 \(torchao_tensorwise by convert_model\)"
    ):
        load_quantized(model, tmp_path)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_export_of_other_sizes_is_named_with_both_shapes(tmp_path: Path) -> None:
    export_quantized(trained(QuantizedScheme()), tmp_path)
    model = net()
    model.blocks[0] = nn.Linear(64, 128)
    match = r"blocks\.0\.weight has the shape \(96, 64\) in the export and \(128, 64\) in the model, as are 1 more"
    with pytest.raises(PrecisionError, match=match):
        load_quantized(model, tmp_path)
