"""Small models of transformers, and the same computed and trained by plain code."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optional_modules import skip_without

NUM_TOKENS = 61  # which two ranks cannot divide
_SIZES = {
    "vocab_size": NUM_TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "tied llama": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": True}),
    "llama 3": ("LlamaConfig", {**_SIZES, "rope_parameters": _LLAMA3}),
    "mistral": ("MistralConfig", {**_SIZES, "sliding_window": None, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": NUM_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
}


def skip_without_megatron() -> None:
    """Skip a test where Megatron-Core or transformers is missing; tests/megatron alone is no library."""
    skip_without("transformers")
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")


def config_of(kind: str) -> Any:
    import transformers

    name, sizes = KINDS[kind]
    return getattr(transformers, name)(**sizes)


def model_of(kind: str, *, seed: int = 0) -> Any:
    """A model whose every weight is drawn, so that none that is mixed up computes the same."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise / 10 if parameter.dim() == 1 else noise / parameter.shape[-1] ** 0.5)
    return model


def tokens(rows: int = 4, length: int = 12, *, seed: int = 1) -> Tensor:
    """Token ids of shape (rows, length)."""
    return torch.randint(NUM_TOKENS, (rows, length), generator=torch.Generator().manual_seed(seed))


def places(ids: Tensor) -> Tensor:
    """The positions of token ids, of the same shape."""
    return torch.arange(ids.shape[1]).expand_as(ids).contiguous()


def losses_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The losses of Megatron's model at each position but the last, whose label nobody knows."""
    labels = ids.roll(-1, dims=1)
    return model(ids, places(ids), None, labels=labels)[:, :-1]
