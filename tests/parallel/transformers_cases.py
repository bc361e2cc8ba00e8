"""Small models of transformers, with the arguments that their forward is called with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 65
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_IMAGES = {
    **{key: value for key, value in _SIZES.items() if key != "vocab_size"},
    "image_size": 32,
    "patch_size": 8,
}
_ENCODER_AND_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": VOCABULARY,
}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A class of transformers.

    Attributes:
        model: The name of the class.
        config: The name of the class of its settings.
        settings: Its settings.
        inputs: The names of its inputs.
        in_fp64: Whether all of it runs in fp64.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    inputs: tuple[str, ...] = ("input_ids",)
    in_fp64: bool = True

    def build(self) -> nn.Module:
        import transformers

        config = getattr(transformers, self.config)(**self.settings)
        torch.manual_seed(0)
        return getattr(transformers, self.model)(config).eval()


def inputs_of(case: Case) -> list[Tensor]:
    """Return the inputs in the order of their names."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if case.in_fp64 else torch.float32
    made: dict[str, Callable[[], Tensor]] = {
        "input_ids": lambda: torch.randint(5, VOCABULARY, (2, 7), generator=generator),
        "decoder_input_ids": lambda: torch.randint(5, VOCABULARY, (2, 7), generator=generator),
        "pixel_values": lambda: torch.randn(2, 3, 32, 32, generator=generator, dtype=dtype),
        "input_features": lambda: torch.randn(2, 8, 20, generator=generator, dtype=dtype),
    }
    return [made[name]() for name in case.inputs]


_BOTH = ("input_ids", "decoder_input_ids")
_decoder = partial(Case, settings=_GROUPED)

CASES: Mapping[str, Case] = {
    "llama": _decoder(model="LlamaForCausalLM", config="LlamaConfig"),
    "llama tied": _decoder(
        model="LlamaForCausalLM", config="LlamaConfig", settings={**_GROUPED, "tie_word_embeddings": True}
    ),
    "qwen2": _decoder(model="Qwen2ForCausalLM", config="Qwen2Config"),
    "qwen3": _decoder(model="Qwen3ForCausalLM", config="Qwen3Config", settings={**_GROUPED, "head_dim": 8}),
    "gemma2": _decoder(
        model="Gemma2ForCausalLM",
        config="Gemma2Config",
        settings={
            **_GROUPED,
            "head_dim": 8,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
        },
    ),
    "mistral": _decoder(model="MistralForCausalLM", config="MistralConfig"),
    "mixtral": _decoder(
        model="MixtralForCausalLM",
        config="MixtralConfig",
        settings={**_GROUPED, "num_local_experts": 4},
        in_fp64=False,
    ),
    "qwen3 moe": _decoder(
        model="Qwen3MoeForCausalLM", config="Qwen3MoeConfig", settings={**_GROUPED, **_EXPERTS}, in_fp64=False
    ),
    "gpt2": Case(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        settings={"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": VOCABULARY},
    ),
    "gpt neox": Case(model="GPTNeoXForCausalLM", config="GPTNeoXConfig", settings=_SIZES),
    "opt": Case(
        model="OPTForCausalLM",
        config="OPTConfig",
        settings={
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "vocab_size": VOCABULARY,
            "word_embed_proj_dim": 32,
        },
    ),
    "phi3": _decoder(model="Phi3ForCausalLM", config="Phi3Config", settings={**_GROUPED, "pad_token_id": 0}),
    "bert": Case(model="BertForMaskedLM", config="BertConfig", settings=_SIZES),
    "distilbert": Case(
        model="DistilBertForMaskedLM",
        config="DistilBertConfig",
        settings={"dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY},
    ),
    "roberta": Case(model="RobertaForMaskedLM", config="RobertaConfig", settings=_SIZES),
    "electra": Case(
        model="ElectraForMaskedLM", config="ElectraConfig", settings={**_SIZES, "embedding_size": 32}
    ),
    "t5": Case(
        model="T5ForConditionalGeneration",
        config="T5Config",
        settings={
            "d_model": 32,
            "d_kv": 8,
            "num_heads": 4,
            "num_layers": 2,
            "d_ff": 64,
            "vocab_size": VOCABULARY,
        },
        inputs=_BOTH,
    ),
    "bart": Case(
        model="BartForConditionalGeneration", config="BartConfig", settings=_ENCODER_AND_DECODER, inputs=_BOTH
    ),
    "whisper": Case(
        model="WhisperForConditionalGeneration",
        config="WhisperConfig",
        settings={**_ENCODER_AND_DECODER, "num_mel_bins": 8, "max_source_positions": 10, "pad_token_id": 0},
        inputs=("input_features", "decoder_input_ids"),
    ),
    "vit": Case(
        model="ViTForImageClassification", config="ViTConfig", settings=_IMAGES, inputs=("pixel_values",)
    ),
    "deit": Case(
        model="DeiTForImageClassification", config="DeiTConfig", settings=_IMAGES, inputs=("pixel_values",)
    ),
    "swin": Case(
        model="SwinForImageClassification",
        config="SwinConfig",
        settings={
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        inputs=("pixel_values",),
    ),
    "clip vision": Case(
        model="CLIPVisionModel", config="CLIPVisionConfig", settings=_IMAGES, inputs=("pixel_values",)
    ),
    "deepseek v3": Case(model="DeepseekV3ForCausalLM", config="DeepseekV3Config", settings=_LATENT),
    "gptj": Case(
        model="GPTJForCausalLM",
        config="GPTJConfig",
        settings={"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": VOCABULARY, "rotary_dim": 4},
    ),
}
