"""Small models of diffusers: denoisers, and the autoencoders beside them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from optional_modules import import_later
from sweep.model_cases import ModelCase, seeded

diffusers = import_later("diffusers")
Batch = Callable[[int], dict[str, Any]]

_UNET: Mapping[str, Any] = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 16,
}  # fmt: skip
_CODER: Mapping[str, Any] = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
_HEADS: Mapping[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}


def _drawn(index: int, shapes: Mapping[str, tuple[int, ...]], **others: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    return {**{name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}, **others}


def _inputs(*, times: str = "timestep", **shapes: tuple[int, ...]) -> Batch:
    """Return batches of these tensors, and a step of the schedule for each row."""
    return lambda index: _drawn(index, shapes, **({times: torch.tensor([3.0, 7.0])} if times else {}))


def _unet(index: int) -> dict[str, Any]:
    return _drawn(index, {"sample": (2, 4, 8, 8), "encoder_hidden_states": (2, 6, 16)}, timestep=3)


def _flux(index: int) -> dict[str, Any]:
    return _drawn(
        index,
        {"hidden_states": (2, 16, 4), "encoder_hidden_states": (2, 6, 16), "pooled_projections": (2, 16)},
        timestep=torch.tensor([0.3, 0.7]), img_ids=torch.arange(48.0).reshape(16, 3), txt_ids=torch.zeros(6, 3),
    )  # fmt: skip


def _controlled(index: int) -> dict[str, Any]:
    return {**_unet(index), **_drawn(index, {"controlnet_cond": (2, 3, 16, 16)})}


def _classes(index: int) -> dict[str, Any]:
    steps = {"timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}
    return _drawn(index, {"hidden_states": (2, 4, 8, 8)}, **steps)


def _ltx(index: int) -> dict[str, Any]:
    return _drawn(
        index, {"hidden_states": (2, 8, 4), "encoder_hidden_states": (2, 6, 16)}, timestep=torch.tensor([3, 7]),
        encoder_attention_mask=torch.ones(2, 6), num_frames=2, height=2, width=2,
    )  # fmt: skip


_MODELS: Mapping[str, tuple[Mapping[str, Any], Batch]] = {
    "UNet1DModel": (
        {"block_out_channels": (32, 32, 64), "extra_in_channels": 64, "sample_size": 64}, _inputs(sample=(2, 2, 64)),
    ),
    "UNet2DConditionModel": ({
        **_UNET, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "sample_size": 8,
    }, _unet),
    "ControlNetModel": ({**_UNET, "conditioning_embedding_out_channels": (4, 8)}, _controlled),
    "Transformer2DModel": ({
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 8, "norm_num_groups": 4,
        "cross_attention_dim": 16,
    }, _inputs(times="", hidden_states=(2, 8, 4, 4), encoder_hidden_states=(2, 6, 16))),
    "PriorTransformer": ({**_HEADS, "embedding_dim": 16, "num_embeddings": 4, "additional_embeddings": 4}, _inputs(
        hidden_states=(2, 16), proj_embedding=(2, 16), encoder_hidden_states=(2, 4, 16),
    )),
    "DiTTransformer2DModel": ({**_HEADS, "in_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 10}, _classes),
    "PixArtTransformer2DModel": ({
        **_HEADS, "in_channels": 4, "out_channels": 8, "sample_size": 8, "caption_channels": 16,
        "cross_attention_dim": 16, "use_additional_conditions": False,
    }, lambda index: _drawn(
        index, {"hidden_states": (2, 4, 8, 8), "encoder_hidden_states": (2, 6, 16)}, timestep=torch.tensor([3, 7]),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    )),
    "SanaTransformer2DModel": ({
        "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "in_channels": 4, "out_channels": 4,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16,
        "caption_channels": 16, "sample_size": 8,
    }, _inputs(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 16))),
    "SD3Transformer2DModel": ({
        **_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 16,
        "caption_projection_dim": 16, "pooled_projection_dim": 16, "pos_embed_max_size": 8,
    }, _inputs(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 16), pooled_projections=(2, 16))),
    "AuraFlowTransformer2DModel": ({
        "num_attention_heads": 2, "attention_head_dim": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
        "joint_attention_dim": 16, "caption_projection_dim": 16, "sample_size": 8, "pos_embed_max_size": 64,
    }, _inputs(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 16))),
    "FluxTransformer2DModel": ({
        "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8),
    }, _flux),
    "StableAudioDiTModel": ({
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 4, "num_key_value_attention_heads": 2, "cross_attention_dim": 16,
        "cross_attention_input_dim": 16, "time_proj_dim": 16, "global_states_input_dim": 16,
    }, _inputs(
        hidden_states=(2, 4, 8), encoder_hidden_states=(2, 6, 16), global_hidden_states=(2, 1, 16),
    )),
    "CogVideoXTransformer3DModel": ({
        **_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16, "sample_width": 8,
        "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 6,
    }, _inputs(hidden_states=(2, 2, 4, 8, 8), encoder_hidden_states=(2, 6, 16))),
    "LTXVideoTransformer3DModel": ({
        **_HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "caption_channels": 16,
    }, _ltx),
    "MochiTransformer3DModel": ({
        **_HEADS, "in_channels": 4, "pooled_projection_dim": 8, "text_embed_dim": 16, "time_embed_dim": 8,
    }, lambda index: _drawn(
        index, {"hidden_states": (2, 4, 2, 8, 8), "encoder_hidden_states": (2, 6, 16)},
        timestep=torch.tensor([3, 7]), encoder_attention_mask=torch.ones(2, 6, dtype=torch.bool),
    )),
    "AllegroTransformer3DModel": ({
        **_HEADS, "in_channels": 4, "out_channels": 4, "caption_channels": 16, "sample_width": 8,
        "sample_height": 8, "sample_frames": 5, "attention_head_dim": 24, "cross_attention_dim": 48,
    }, lambda index: _drawn(
        index, {"hidden_states": (2, 4, 2, 8, 8), "encoder_hidden_states": (2, 6, 16)},
        timestep=torch.tensor([3, 7]), attention_mask=torch.ones(2, 2, 8, 8),
        encoder_attention_mask=torch.ones(2, 6),
    )),
    "WanTransformer3DModel": ({
        **_HEADS, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16,
        "ffn_dim": 32, "patch_size": (1, 2, 2),
    }, _inputs(hidden_states=(2, 4, 2, 8, 8), encoder_hidden_states=(2, 6, 16))),
    "AutoencoderTiny": ({
        "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    }, _inputs(times="", sample=(2, 3, 16, 16))),
    "AsymmetricAutoencoderKL": ({
        "down_block_out_channels": (8, 8), "up_block_out_channels": (8, 8), "norm_num_groups": 4,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
        "layers_per_down_block": 1, "layers_per_up_block": 1,
    }, _inputs(times="", sample=(2, 3, 16, 16))),
    "AutoencoderKLTemporalDecoder": ({
        "block_out_channels": (32, 32), "layers_per_block": 1, "down_block_types": ("DownEncoderBlock2D",) * 2,
    }, lambda index: _drawn(index, {"sample": (2, 3, 16, 16)}, num_frames=1)),
    "ConsistencyDecoderVAE": ({
        "encoder_block_out_channels": (8, 8), "encoder_down_block_types": ("DownEncoderBlock2D",) * 2,
        "encoder_layers_per_block": 1, "encoder_norm_num_groups": 4, "decoder_block_out_channels": (8, 8),
        "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2, "decoder_layers_per_block": 1,
        "decoder_norm_num_groups": 4, "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2,
    }, _inputs(times="", sample=(2, 3, 16, 16))),
}  # fmt: skip


def denoising_cases() -> dict[str, ModelCase]:
    """Return the cases by class."""
    return {
        name: ModelCase(
            build=seeded(lambda name=name, options=options: getattr(diffusers, name)(**options)), batch=batch
        )
        for name, (options, batch) in _MODELS.items()
    }
