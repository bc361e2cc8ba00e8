"""What a config of transformers says becomes options of Megatron's, or is refused by name."""

from typing import Any

import pytest

from drivetrain_megatron.conversion import check_sizes
from drivetrain_megatron.shapes import shape_of
from megatron_models import KINDS, config_of

_HALF_AS_LONG = {**config_of("llama 3").rope_parameters, "original_max_position_embeddings": 4096}


def test_sizes_and_kinds_are_read() -> None:
    shape = shape_of(config_of("qwen3"))
    assert (shape.kind, shape.sizes.num_groups, shape.sizes.head_size) == ("qwen3", 2, 16)
    assert shape.config["qk_layernorm"]
    assert shape.config["kv_channels"] == 16
    assert not shape.config["add_qkv_bias"]
    assert shape_of(config_of("qwen2")).config["add_qkv_bias"]
    assert shape_of(config_of("mixtral")).config["num_moe_experts"] == 4
    assert shape_of(config_of("tied llama")).model["share_embeddings_and_output_weights"]
    assert shape_of(config_of("gpt2")).model["position_embedding_type"] == "learned_absolute"


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("llama", "hidden_act", "gelu", "hidden_act='gelu': Megatron's layers compute 'silu';"),
        ("llama", "mlp_bias", True, "mlp_bias=True"),
        ("llama", "attention_bias", True, "attention_bias=True"),
        ("llama", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}, r"\['rope_type'\]='linear'"),
        ("llama 3", "rope_parameters", _HALF_AS_LONG, r"\['original_max_position_embeddings'\]=4096.* compute 8192"),
        ("mistral", "sliding_window", 8, "sliding_window=8"),
        ("mixtral", "router_jitter_noise", 0.1, "router_jitter_noise=0.1"),
        ("gpt2", "activation_function", "relu", "activation_function='relu': .* 'gelu_new' or 'gelu_pytorch_tanh'"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", "resid_pdrop", 0.3, r"resid_pdrop=0\.3: Megatron's layers compute 0\.0"),
        ("llama", "model_type", "bloom", "model_type='bloom' has no counterpart in Megatron here: llama, mistral"),
    ],
)  # fmt: skip
def test_what_megatron_would_compute_otherwise_is_refused(
    kind: str, name: str, value: Any, message: str
) -> None:
    config = config_of(kind)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        shape_of(config)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_ranks_cannot_divide_are_refused(kind: str) -> None:
    shape = shape_of(config_of(kind))
    check_sizes(shape.config, 128, size=2)
    with pytest.raises(
        ValueError, match=r"tensor=3: the model has 4 attention heads, which 3 ranks cannot divide"
    ):
        check_sizes(shape.config, 128, size=3)
    with pytest.raises(ValueError, match=r"61 rows of the vocabulary \(vocab_multiple\)"):
        check_sizes(shape.config, 61, size=2)
