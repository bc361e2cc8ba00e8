"""The shape of a model of transformers in Megatron's words: options of its `TransformerConfig` and its `GPTModel`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F

from drivetrain_megatron.weights import TABLES, TableSizes

# What Megatron's layers compute of Llama 3's scaled rotary embedding, beside its factor.
_SCALING: Mapping[str, float] = MappingProxyType(
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The arguments that Megatron builds a model from.

    Attributes:
        kind: The `model_type` of transformers.
        sizes: The numbers that its table of weights is read with.
        config: The arguments of `TransformerConfig`.
        model: The arguments of `GPTModel`.
        vocab_size: The number of tokens.
    """

    kind: str
    sizes: TableSizes
    vocab_size: int
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])


def shape_of(config: Any) -> ModelShape:
    """Return the shape of a model of transformers, by its config.

    Raises:
        ValueError: Megatron's layers cannot compute what the config says; the message names the field.
    """
    kind = config.model_type
    if kind not in TABLES:
        raise ValueError(
            f"model_type={kind!r} has no counterpart in Megatron here: {', '.join(TABLES)} have; backend='ddp' or "
            "'fsdp' with parallel.tensor divides any model of transformers as it is"
        )
    read = _gpt2 if kind == "gpt2" else _llama
    return read(config)


def _llama(config: Any) -> ModelShape:
    kind = config.model_type
    allowed: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "mlp_bias": (False,)}
    allowed["attention_bias"] = (kind == "qwen2", False)
    allowed["router_jitter_noise"] = (0.0,)
    _check(config, allowed)
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        raise _refused("sliding_window", config.sliding_window, (None,))
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_experts = getattr(config, "num_local_experts", 0)
    options: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_size,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind == "qwen2",
        "qk_layernorm": kind == "qwen3",
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": 0.0,
        "init_method_std": config.initializer_range,
    }
    if num_experts:
        options |= {
            "num_moe_experts": num_experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": config.intermediate_size,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }
    return ModelShape(
        kind=kind,
        sizes=TableSizes(
            num_layers=config.num_hidden_layers,
            num_groups=config.num_key_value_heads,
            head_size=head_size,
            num_experts=num_experts,
            is_tied=config.tie_word_embeddings,
        ),
        vocab_size=config.vocab_size,
        config=MappingProxyType(options),
        model=MappingProxyType(
            {
                "max_sequence_length": config.max_position_embeddings,
                **_rope(config.rope_parameters),
                "share_embeddings_and_output_weights": config.tie_word_embeddings,
            }
        ),
    )


def _rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `GPTModel` for a rotary embedding."""
    kind = given["rope_type"]
    if kind not in ("default", "llama3"):
        raise _refused("rope_parameters['rope_type']", kind, ("default", "llama3"))
    found = {"position_embedding_type": "rope", "rotary_base": given["rope_theta"]}
    if kind == "default":
        return found
    for name, value in _SCALING.items():
        if given[name] != value:
            raise _refused(f"rope_parameters['{name}']", given[name], (value,))
    return found | {"rope_scaling": True, "rope_scaling_factor": given["factor"]}


def _gpt2(config: Any) -> ModelShape:
    _check(
        config,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "resid_pdrop": (config.embd_pdrop,),
        },
    )
    gelu: Callable[..., Any] = partial(F.gelu, approximate="tanh")
    return ModelShape(
        kind="gpt2",
        sizes=TableSizes(
            num_layers=config.n_layer,
            num_groups=config.n_head,
            head_size=config.n_embd // config.n_head,
            is_tied=config.tie_word_embeddings,
        ),
        vocab_size=config.vocab_size,
        config=MappingProxyType(
            {
                "num_layers": config.n_layer,
                "hidden_size": config.n_embd,
                "num_attention_heads": config.n_head,
                "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
                "normalization": "LayerNorm",
                "layernorm_epsilon": config.layer_norm_epsilon,
                "activation_func": gelu,
                "attention_dropout": config.attn_pdrop,
                "hidden_dropout": config.resid_pdrop,
                "init_method_std": config.initializer_range,
            }
        ),
        model=MappingProxyType(
            {
                "max_sequence_length": config.n_positions,
                "position_embedding_type": "learned_absolute",
                "share_embeddings_and_output_weights": config.tie_word_embeddings,
            }
        ),
    )


def _check(config: Any, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a field, where the config has it, with another value than those allowed."""
    for name, values in allowed.items():
        if (value := getattr(config, name, values[0])) not in values:
            raise _refused(name, value, values)


def _refused(name: str, value: object, allowed: tuple[Any, ...]) -> ValueError:
    return ValueError(
        f"{name}={value!r}: Megatron's layers compute {' or '.join(map(repr, allowed))}; backend='ddp' or 'fsdp' "
        "with parallel.tensor divides the model as it is"
    )
