"""The blocks that converted models are made of: Megatron's own layers, with torch's norms between them."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from drivetrain_megatron.library import (
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    parallel_state,
)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the blocks of a model, in which ranks may also divide what stands between layers along sequences.

    Megatron's own norms come from Apex or Transformer Engine where ranks divide sequences. These are torch's,
    with the mark by which gradients of parts of a sequence are added up.
    """
    is_rms = config.normalization == "RMSNorm"
    norm: Any = RootMeanSquareNorm if is_rms else LayerNorm
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer: Any = spec.submodules
    attention: Any = layer.self_attention
    if config.qk_layernorm:
        heads = replace(attention.submodules, q_layernorm=norm, k_layernorm=norm)
        attention = replace(attention, submodules=heads)
    layer = replace(layer, input_layernorm=norm, pre_mlp_layernorm=norm, self_attention=attention)
    layers = [replace(spec, submodules=layer)] * get_num_layers_to_build(config)  # of this rank's stage
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


class RootMeanSquareNorm(nn.RMSNorm):
    """Torch's RMSNorm, built as Megatron builds norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        mark_between_layers(self, config)


class LayerNorm(nn.LayerNorm):
    """Torch's LayerNorm, built as Megatron builds norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        mark_between_layers(self, config)


def mark_between_layers(norm: nn.Module, config: TransformerConfig) -> None:
    """Mark parameters whose gradients are of parts of a sequence, if ranks divide sequences there."""
    for parameter in norm.parameters():
        marked: Any = parameter
        marked.sequence_parallel = config.sequence_parallel


class HidePadding:
    """A hook of an output layer: tokens that only pad the vocabulary get no probability, and so no gradient.

    Args:
        vocab_size: The number of tokens.
        padded_size: The number of rows of the layer among all ranks.
    """

    def __init__(self, vocab_size: int, padded_size: int) -> None:
        self._vocab_size, self._padded_size = vocab_size, padded_size

    def __call__(self, layer: nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> None:
        """Fill the logits of padding, in place."""
        del layer, inputs
        logits, width = output[0], output[0].shape[-1]
        is_part = width < self._padded_size
        start = width * parallel_state.get_tensor_model_parallel_rank() if is_part else 0
        num_real = min(max(self._vocab_size - start, 0), width)
        if num_real < width:
            logits.narrow(-1, num_real, width - num_real).fill_(-1e4)
