"""Small models of transformers that see and read."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dispatch_sweep.text_cases import token_ids
from sweep.model_cases import ModelCase, small, transformers_case

_IMAGE = 70  # the token that stands for a part of an image
_TEXT: Mapping[str, Any] = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SIGHT: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_CLIP_TEXT: Mapping[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_QWEN_ROPE: Mapping[str, Any] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QFORMER: Mapping[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "encoder_hidden_size": 32, "cross_attention_frequency": 1,
}  # fmt: skip


def _llava() -> dict[str, Any]:
    return {
        "vision_config": {"model_type": "clip_vision_model", **_SIGHT}, "image_seq_length": 16,
        "text_config": {"model_type": "llama", **_TEXT}, "image_token_index": _IMAGE, "image_token_id": _IMAGE,
    }  # fmt: skip


# By the kind of their configuration: the class, its options, and how many tokens an image takes; none for those that
# compare a text with an image.
_MODELS: Mapping[str, tuple[str, Mapping[str, Any], int | None]] = {
    "llava": ("LlavaForConditionalGeneration", _llava(), 16),
    "vipllava": ("VipLlavaForConditionalGeneration", {**_llava(), "vision_feature_layers": [-2, -1]}, 16),
    "paligemma": ("PaliGemmaForConditionalGeneration", {
        "vision_config": {"model_type": "siglip_vision_model", **_SIGHT, "vision_use_head": False},
        "text_config": {"model_type": "gemma", **_TEXT, "head_dim": 8}, "projection_dim": 32, "hidden_size": 32,
        "image_token_index": _IMAGE, "image_token_id": _IMAGE,
    }, 16),
    "gemma3": ("Gemma3ForConditionalGeneration", {
        "vision_config": {"model_type": "siglip_vision_model", **_SIGHT, "vision_use_head": False},
        "text_config": {"model_type": "gemma3_text", **_TEXT, "head_dim": 8, "sliding_window": 16},
        "mm_tokens_per_image": 4, "image_token_index": _IMAGE, "image_token_id": _IMAGE,
    }, 4),
    "aya_vision": ("AyaVisionForConditionalGeneration", {
        "vision_config": {"model_type": "siglip_vision_model", **_SIGHT, "vision_use_head": False},
        "text_config": {"model_type": "cohere2", **_TEXT, "head_dim": 8}, "image_token_index": _IMAGE,
        "image_token_id": _IMAGE, "downsample_factor": 2, "adapter_layer_norm_eps": 1e-6,
    }, 4),
    "internvl": ("InternVLForConditionalGeneration", {
        "vision_config": {
            "model_type": "internvl_vision", **_SIGHT, "image_size": [16, 16], "patch_size": [4, 4],
        },
        "text_config": {"model_type": "qwen2", **_TEXT}, "image_token_id": _IMAGE, "image_seq_length": 4,
    }, 4),
    "got_ocr2": ("GotOcr2ForConditionalGeneration", {
        "vision_config": {
            "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 64, "patch_size": 4, "mlp_dim": 24, "window_size": 2, "global_attn_indexes": [1],
        },
        "text_config": {"model_type": "qwen2", **_TEXT}, "image_token_id": _IMAGE, "image_seq_length": 16,
    }, 16),
    "idefics3": ("Idefics3ForConditionalGeneration", {
        "vision_config": dict(_SIGHT), "text_config": {"model_type": "llama", **_TEXT}, "scale_factor": 2,
        "image_token_id": _IMAGE,
    }, 4),
    "smolvlm": ("SmolVLMForConditionalGeneration", {
        "vision_config": dict(_SIGHT), "text_config": {"model_type": "llama", **_TEXT}, "scale_factor": 2,
        "image_token_id": _IMAGE,
    }, 4),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {
        "vision_config": {
            "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        "text_config": {**_TEXT, "rope_parameters": dict(_QWEN_ROPE)}, "image_token_id": _IMAGE, "video_token_id": 71,
        "vision_start_token_id": 72, "vision_end_token_id": 73,
    }, 4),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", {
        "vision_config": {
            "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 48,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [1],
            "window_size": 16,
        },
        "text_config": {**_TEXT, "rope_parameters": dict(_QWEN_ROPE)}, "image_token_id": _IMAGE, "video_token_id": 71,
        "vision_start_token_id": 72, "vision_end_token_id": 73,
    }, 4),
    "blip-2": ("Blip2ForConditionalGeneration", {
        "vision_config": dict(_SIGHT), "qformer_config": dict(_QFORMER), "num_query_tokens": 4,
        "text_config": {"model_type": "opt", **_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32},
        "image_token_index": _IMAGE, "image_token_id": _IMAGE,
    }, 4),
    "mllama": ("MllamaForConditionalGeneration", {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
            "attention_heads": 4, "image_size": 16, "patch_size": 4, "vision_output_dim": 64, "max_num_tiles": 1,
            "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
        },
        "text_config": {
            **_TEXT, "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "image_token_index": _IMAGE,
    }, 1),
    "clip": ("CLIPModel", {
        "vision_config": dict(_SIGHT), "text_config": dict(_CLIP_TEXT), "projection_dim": 16,
    }, None),
    "metaclip_2": ("MetaClip2Model", {
        "vision_config": dict(_SIGHT), "text_config": dict(_CLIP_TEXT), "projection_dim": 16,
    }, None),
    "siglip": ("SiglipModel", {
        "vision_config": dict(_SIGHT), "text_config": {**_CLIP_TEXT, "projection_size": 32},
    }, None),
    "chinese_clip": ("ChineseCLIPModel", {
        "vision_config": dict(_SIGHT), "text_config": dict(_CLIP_TEXT), "projection_dim": 16,
    }, None),
    "altclip": ("AltCLIPModel", {
        "vision_config": dict(_SIGHT), "text_config": {**_CLIP_TEXT, "project_dim": 16}, "projection_dim": 16,
    }, None),
    "blip": ("BlipModel", {
        "vision_config": dict(_SIGHT), "projection_dim": 16,
        "text_config": {**_CLIP_TEXT, "encoder_hidden_size": 32, "projection_dim": 16},
    }, None),
    "clipseg": ("CLIPSegModel", {
        "vision_config": dict(_SIGHT), "text_config": dict(_CLIP_TEXT), "projection_dim": 16,
    }, None),
    "owlvit": ("OwlViTModel", {
        "vision_config": dict(_SIGHT), "text_config": dict(_CLIP_TEXT), "projection_dim": 16,
    }, None),
    "git": ("GitForCausalLM", {"vision_config": dict(_SIGHT), "hidden_size": 32}, None),
    "vilt": ("ViltModel", {}, None),
}  # fmt: skip


def mixed_cases() -> dict[str, ModelCase]:
    """Return the cases by the kind of their configuration."""
    return {
        name: transformers_case(
            kind,
            lambda name=name, options=options: small(name, **options),
            lambda index, name=name, number=number: _pairs(index, name, number),
        )
        for name, (kind, options, number) in _MODELS.items()
    }


def _pairs(index: int, name: str, num_image_tokens: int | None) -> dict[str, Any]:
    """Return two texts with an image each."""
    text = token_ids(index, 12)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(index))
    if num_image_tokens is None:
        batch: dict[str, Any] = {"input_ids": text, "pixel_values": pixels}
        return {**batch, "input_ids": token_ids(index, 4)} if name == "git" else batch
    marks = torch.full((2, num_image_tokens), _IMAGE)
    ids = torch.cat([text[:, :2], marks, text[:, 2:]], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **_seen(name, ids, pixels)}


def _seen(name: str, ids: Tensor, pixels: Tensor) -> dict[str, Any]:
    """Return what the model takes for its images beside the marks in the text."""
    if name.startswith("qwen"):
        patches = pixels.reshape(32, 48)  # of 4 x 4, in whatever order
        grids = torch.tensor([[1, 4, 4], [1, 4, 4]])
        return {
            "pixel_values": torch.cat([patches, patches], dim=1), "image_grid_thw": grids,
            "mm_token_type_ids": (ids == _IMAGE).int(),
        }  # fmt: skip
    if name == "mllama":
        return {
            "pixel_values": pixels[:, None, None],
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, ids.shape[1], 1, 1, dtype=torch.long),
        }
    if name in ("idefics3", "smolvlm"):
        return {"pixel_values": pixels[:, None]}
    if name == "got_ocr2":
        return {"pixel_values": torch.nn.functional.interpolate(pixels, size=64)}
    if name in ("gemma3", "paligemma"):
        return {"pixel_values": pixels, "token_type_ids": (ids == _IMAGE).long()}
    return {"pixel_values": pixels}
