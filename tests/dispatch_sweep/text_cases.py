"""Small language models of transformers that the sweep of training does not have: decoders, encoders, and both."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sweep.model_cases import ModelCase, small, transformers_case

_LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
_LATENT = {
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8,
    "head_dim": 4, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip

# Of decoders, by the kind of their configuration: the class, and what `small` does not say of it.
_DECODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "gemma4_text": ("Gemma4ForCausalLM", {
        "head_dim": None, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "gpt_neo": ("GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]]}),
    "glm4": ("Glm4ForCausalLM", {}),
    "glm4_moe": ("Glm4MoeForCausalLM", {"first_k_dense_replace": 1}),
    "cohere2": ("Cohere2ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {}),
    "flex_olmo": ("FlexOlmoForCausalLM", {}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {"moe_num_experts": 4, "moe_k": 2}),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", {}),
    "bitnet": ("BitNetForCausalLM", {}),
    "diffllama": ("DiffLlamaForCausalLM", {}),
    "doge": ("DogeForCausalLM", {}),
    "ctrl": ("CTRLLMHeadModel", {"dff": 48}),
    "modernbert-decoder": ("ModernBertDecoderForCausalLM", {}),
    "bert-generation": ("BertGenerationDecoder", {"is_decoder": True}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _LATENT),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "phimoe": ("PhimoeForCausalLM", {}),
    "minimax": ("MiniMaxForCausalLM", {**_LINEAR_AND_FULL, "block_size": 8}),
    "dbrx": ("DbrxForCausalLM", {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "max_seq_len": 64,
    }),
    "dots1": ("Dots1ForCausalLM", {
        "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    }),
    "llama4_text": ("Llama4ForCausalLM", {
        "intermediate_size_mlp": 48, "moe_layers": [1], "attention_chunk_size": 16,
    }),
    "jamba": ("JambaForCausalLM", {
        "attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    }),
    "mamba2": ("Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}),
    "falcon_mamba": ("FalconMambaForCausalLM", {}),
    "falcon_h1": ("FalconH1ForCausalLM", {**_MAMBA, "mamba_d_ssm": 64}),
    "rwkv": ("RwkvForCausalLM", {}),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", {
        "block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 8,
    }),
    "bamba": ("BambaForCausalLM", {**_MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {
        **_MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48,
    }),
    "zamba": ("ZambaForCausalLM", {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "attn_layer_period": 2,
        "attn_layer_offset": 1, "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_head_dim": 16,
        "attention_hidden_size": 64, "num_key_value_heads": 4, "use_mamba_kernels": False,
    }),
    "zamba2": ("Zamba2ForCausalLM", {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_key_value_heads": 4,
        "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_d_state": 8, "chunk_size": 8, "use_mem_rope": False,
        "attention_head_dim": 16, "attention_hidden_size": 64, "num_mem_blocks": 1, "adapter_rank": 4,
    }),
    "qwen3_next": ("Qwen3NextForCausalLM", {
        **_LINEAR_AND_FULL, **_DELTA, "shared_expert_intermediate_size": 16, "partial_rotary_factor": 0.5,
    }),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {**_LINEAR_AND_FULL, **_DELTA}),
    "lfm2": ("Lfm2ForCausalLM", {
        "layer_types": ["conv", "full_attention"], "block_ff_dim": 48, "block_multiple_of": 8,
    }),
}  # fmt: skip

_ENCODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "funnel": ("FunnelForMaskedLM", {
        "num_hidden_layers": None, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": 8, "d_inner": 48,
    }),
    "xlnet": ("XLNetLMHeadModel", {"max_position_embeddings": None, "d_inner": 48}),
    "mobilebert": ("MobileBertForMaskedLM", {
        "embedding_size": 32, "intra_bottleneck_size": 16, "true_hidden_size": 16, "num_feedforward_networks": 1,
    }),
    "roc_bert": ("RoCBertForMaskedLM", {"pronunciation_vocab_size": 16, "shape_vocab_size": 16}),
    "mra": ("MraForMaskedLM", {}),
    "yoso": ("YosoForMaskedLM", {}),
    "esm": ("EsmForMaskedLM", {"mask_token_id": 3}),
    "roberta-prelayernorm": ("RobertaPreLayerNormForMaskedLM", {}),
    "data2vec-text": ("Data2VecTextForMaskedLM", {}),
    "splinter": ("SplinterModel", {}),
    "layoutlm": ("LayoutLMForMaskedLM", {"max_2d_position_embeddings": 64}),
    "xmod": ("XmodForMaskedLM", {"default_language": "en_XX", "languages": ["en_XX", "de_DE"]}),
    "canine": ("CanineModel", {
        "num_hash_buckets": 64, "max_position_embeddings": 128, "local_transformer_stride": 64,
    }),
    "reformer": ("ReformerModelWithLMHead", {
        "axial_pos_embds": False, "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
        "attn_layers": ["local", "local"],
        "attention_head_size": 8, "feed_forward_size": 48, "is_decoder": True, "local_attn_chunk_length": 8,
    }),
}  # fmt: skip
_WITHOUT_LABELS = ("splinter", "canine")

_T5 = {
    "num_layers": 2,
    "num_heads": 4,
    "d_ff": 48,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
_SEQUENCES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", _T5),
    "longt5": ("LongT5ForConditionalGeneration", {**_T5, "local_radius": 7}),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", {
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_layers": 2, "expert_capacity": 64,
        "decoder_start_token_id": 0,
    }),
    "led": ("LEDForConditionalGeneration", {
        "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    }),
    "bigbird_pegasus": ("BigBirdPegasusForConditionalGeneration", {"attention_type": "original_full"}),
    "prophetnet": ("ProphetNetForConditionalGeneration", {
        "num_hidden_layers": None, "num_encoder_layers": 1, "num_decoder_layers": 1, "ngram": 2,
        "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    }),
    "mvp": ("MvpForConditionalGeneration", {}),
    "pegasus_x": ("PegasusXForConditionalGeneration", {"block_size": 8, "num_global_tokens": 4}),
    "blenderbot-small": ("BlenderbotSmallForConditionalGeneration", {}),
}  # fmt: skip


def text_cases() -> dict[str, ModelCase]:
    """Return the cases by the kind of their configuration."""
    cases: dict[str, ModelCase] = {}
    for name, (kind, options) in {**_DECODERS, **_ENCODERS, **_SEQUENCES}.items():
        batch = tokens if name in _WITHOUT_LABELS else labelled_tokens
        build = partial(configured, name, options)
        cases[name] = transformers_case(kind, build, batch)
    return cases


def configured(name: str, options: Mapping[str, Any]) -> Any:
    """Return a small configuration, without those of the usual sizes that `options` gives as None."""
    return small(
        name, without=[key for key, value in options.items() if value is None],
        **{key: value for key, value in options.items() if value is not None},
    )  # fmt: skip


def token_ids(index: int, length: int = 16) -> Tensor:
    """Return two rows of tokens, of shape (2, length), none of them a special one."""
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(index))


def tokens(index: int) -> dict[str, Any]:
    """Return two rows of tokens."""
    return {"input_ids": token_ids(index)}


def labelled_tokens(index: int) -> dict[str, Any]:
    """Return two rows of tokens that are their own labels."""
    return {"input_ids": token_ids(index), "labels": token_ids(index)}
