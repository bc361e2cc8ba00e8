"""Small models of transformers that see, hear, or foretell a series."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dispatch_sweep.text_cases import token_ids
from sweep.model_cases import ModelCase, small, transformers_case

Batch = Callable[[int], dict[str, Any]]

_SPEECH = {
    "num_feat_extract_layers": 2, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
}  # fmt: skip
_SPEECH_AND_CTC = {**_SPEECH, "mask_time_prob": 0.0}
_SWIN = {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
_DETECTION = {"num_queries": 4, "encoder_layers": 1, "decoder_layers": 1}
_RESNET = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": {
        "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
        "layer_type": "basic", "out_features": ["stage2"],
    },
}  # fmt: skip
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}

_VISION: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "vit for images": ("vit", 16, {"_class": "ViTForImageClassification"}),
    "beit for images": ("beit", 16, {"_class": "BeitForImageClassification"}),
    "vit_mae pretraining": ("vit_mae", 16, {
        "_class": "ViTMAEForPreTraining", "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2, "decoder_intermediate_size": 24,
    }),
    "vit_msn": ("vit_msn", 16, {"_class": "ViTMSNModel"}),
    "dinov2_with_registers": ("dinov2_with_registers", 16, {"_class": "Dinov2WithRegistersModel"}),
    "dinov3_vit": ("dinov3_vit", 16, {"_class": "DINOv3ViTModel"}),
    "swinv2": ("swinv2", 32, {"_class": "Swinv2Model", **_SWIN}),
    "donut-swin": ("donut-swin", 32, {"_class": "DonutSwinModel", **_SWIN}),
    "focalnet": ("focalnet", 32, {
        "_class": "FocalNetModel", "image_size": 32, "embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
        "focal_levels": [1, 1], "focal_windows": [3, 3],
    }),
    "segformer": ("segformer", 32, {
        "_class": "SegformerForSemanticSegmentation", "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
        "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    }),
    "convnextv2": ("convnextv2", 32, {
        "_class": "ConvNextV2Model", "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2,
    }),
    "regnet": ("regnet", 32, {
        "_class": "RegNetModel", "hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "groups_width": 4,
    }),
    "bit": ("bit", 32, {
        "_class": "BitModel", "hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "num_groups": 4,
    }),
    "poolformer": ("poolformer", 32, {
        "_class": "PoolFormerModel", "hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2,
        "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1],
    }),
    "pvt_v2": ("pvt_v2", 32, {
        "_class": "PvtV2Model", "num_encoder_blocks": 2, "hidden_sizes": [8, 16], "depths": [1, 1],
        "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2], "image_size": 32,
    }),
    "mobilevit": ("mobilevit", 32, {
        "_class": "MobileViTModel", "image_size": 32, "hidden_sizes": [16, 16, 16], "patch_size": 2,
        "neck_hidden_sizes": [4, 8, 8, 8, 8, 8, 16],
    }),
    "mobilenet_v2": ("mobilenet_v2", 32, {"_class": "MobileNetV2Model", "depth_multiplier": 0.1, "min_depth": 4}),
    "hiera": ("hiera", 32, {
        "_class": "HieraModel", "image_size": [32, 32], "patch_stride": [4, 4], "patch_size": [7, 7], "embed_dim": 8,
        "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1, "mlp_ratio": 2.0, "masked_unit_size": [4, 4],
    }),
    "detr": ("detr", 32, {"_class": "DetrForObjectDetection", **_DETECTION, **_RESNET}),
    "conditional_detr": ("conditional_detr", 32, {
        "_class": "ConditionalDetrForObjectDetection", **_DETECTION, **_RESNET,
    }),
    "yolos": ("yolos", 16, {"_class": "YolosForObjectDetection", "image_size": [16, 16], "num_detection_tokens": 4}),
    "dpt": ("dpt", 16, {
        "_class": "DPTForDepthEstimation", "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "is_hybrid": False,
    }),
    "upernet": ("upernet", 32, {
        "_class": "UperNetForSemanticSegmentation", "use_timm_backbone": False, "use_pretrained_backbone": False,
        "backbone": None, "hidden_size": 16, "pool_scales": [1, 2], "auxiliary_channels": 8,
        "auxiliary_in_channels": 16, "num_labels": 3, "backbone_config": {
            "model_type": "convnext", "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_stages": 4,
            "patch_size": 2, "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
    }),
    "superpoint": ("superpoint", 64, {
        "_class": "SuperPointForKeypointDetection", "encoder_hidden_sizes": [8, 8, 8, 8],
        "decoder_hidden_size": 8, "keypoint_decoder_dim": 65, "descriptor_decoder_dim": 8,
    }),
}  # fmt: skip


def _mixed(index: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index))


def images(side: int) -> Batch:
    """Return batches of two square images."""
    return lambda index: {"pixel_values": _mixed(index, 2, 3, side, side)}


def _mels(index: int) -> dict[str, Any]:
    return {"input_features": _mixed(index, 2, 8, 32), "labels": token_ids(index, 6)}


def _frames(index: int) -> dict[str, Any]:
    return {"input_values": _mixed(index, 2, 400)}


def _spoken(index: int) -> dict[str, Any]:
    return {"input_ids": token_ids(index), "decoder_input_values": _mixed(index, 2, 4, 8)}


def _past(index: int) -> dict[str, Any]:
    return {"past_values": _mixed(index, 2, 32, 3)}


def _past_and_future(index: int) -> dict[str, Any]:
    return {
        "past_values": _mixed(index, 2, 10),
        "past_time_features": _mixed(index + 1, 2, 10, 1),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": _mixed(index + 2, 2, 4),
        "future_time_features": _mixed(index + 3, 2, 4, 1),
    }


_HEARING: Mapping[str, tuple[str, Batch, Mapping[str, Any]]] = {
    "hubert": ("HubertForCTC", _frames, _SPEECH_AND_CTC),
    "wavlm": ("WavLMModel", _frames, _SPEECH_AND_CTC),
    "sew": ("SEWModel", _frames, {**_SPEECH_AND_CTC, "squeeze_factor": 2}),
    "unispeech": ("UniSpeechModel", _frames, _SPEECH_AND_CTC),
    "data2vec-audio": ("Data2VecAudioModel", _frames, {
        **_SPEECH_AND_CTC, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3,
    }),
    "whisper": ("WhisperForConditionalGeneration", _mels, {
        "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }),
    "speech_to_text": ("Speech2TextForConditionalGeneration", lambda index: {
        "input_features": _mixed(index, 2, 32, 8), "labels": token_ids(index, 6),
    }, {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64, "max_target_positions": 64}),
    "speecht5": ("SpeechT5ForTextToSpeech", _spoken, {
        **_SPEECH, "num_mel_bins": 8, "reduction_factor": 2, "speech_decoder_prenet_units": 16,
        "speaker_embedding_dim": 8, "speech_decoder_postnet_units": 16, "use_guided_attention_loss": False,
        "speech_decoder_prenet_dropout": 0.0,
    }),
    "audio-spectrogram-transformer": ("ASTModel", lambda index: {"input_values": _mixed(index, 2, 16, 16)}, {
        "max_length": 16, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4,
    }),
    "encodec": ("EncodecModel", lambda index: {"input_values": _mixed(index, 2, 1, 640)}, {
        "num_filters": 4, "hidden_size": 16, "codebook_dim": 16, "codebook_size": 32, "num_lstm_layers": 1,
        "num_residual_layers": 1, "target_bandwidths": [1.5],
    }),
    "patchtst": ("PatchTSTForPretraining", _past, {
        "num_input_channels": 3, "context_length": 32, "patch_length": 4, "patch_stride": 4, "ffn_dim": 48,
    }),
    "patchtsmixer": ("PatchTSMixerForPretraining", _past, {
        "num_input_channels": 3, "context_length": 32, "patch_length": 4, "patch_stride": 4, "d_model": 16,
    }),
    "time_series_transformer": ("TimeSeriesTransformerForPrediction", _past_and_future, _SERIES),
    "informer": ("InformerForPrediction", _past_and_future, _SERIES),
}  # fmt: skip


def perception_cases() -> dict[str, ModelCase]:
    """Return the cases by name."""
    cases: dict[str, ModelCase] = {}
    for name, (config, side, options) in _VISION.items():
        options = dict(options)
        kind = options.pop("_class")
        cases[name] = transformers_case(
            kind, lambda config=config, options=options: small(config, **options), images(side)
        )
    for name, (kind, batch, options) in _HEARING.items():
        cases[name] = transformers_case(
            kind, lambda name=name, options=options: small(name, **options), batch
        )
    return cases
