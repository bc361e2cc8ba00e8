"""Models that nobody here wrote, small: transformers' and diffusers' own classes, and torch's layers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from optional_modules import import_later

diffusers = import_later("diffusers")

# Every name by which a configuration of transformers says how large a model is.
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "type_vocab_size", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_local_experts"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "vocab_size"), 64),
    **dict.fromkeys(("d_kv", "head_dim", "state_size", "attention_window"), 8),
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": 16,
    "patch_size": 4,
}

LANGUAGE_MODELS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "starcoder2", "olmo", "olmo2", "stablelm",
    "cohere", "granite", "glm", "nemotron", "persimmon", "mixtral", "qwen2_moe", "olmoe", "qwen3_moe", "gpt2",
    "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "codegen", "xglm", "biogpt", "mamba", "bert", "roberta",
    "distilbert", "albert", "electra", "deberta", "deberta-v2", "mpnet", "camembert", "convbert", "roformer",
    "nystromformer", "squeezebert", "ernie", "megatron-bert", "ibert", "fnet", "rembert", "bart", "mbart", "pegasus",
    "blenderbot", "m2m_100", "longformer", "big_bird", "gpt_bigcode", "smollm3", "jetmoe", "granitemoe", "helium",
    "arcee", "apertus", "seed_oss", "modernbert", "xlm", "flaubert", "openai-gpt", "trocr", "marian", "plbart",
    "nllb-moe", "umt5", "mt5",
)  # fmt: skip
VISION_MODELS = ("vit", "deit", "beit", "dinov2", "vit_mae", "ijepa")

_SPEECH = {"num_feat_extract_layers": 2, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
_POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
_CHANNELS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A model and the batches that it is trained on.

    Attributes:
        build: Return the model, always with the same weights.
        batch: Return the batch of a given index, as keyword arguments of the model's forward.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]


class WithoutArguments(nn.Module):
    """A layer of torch whose forward takes its inputs by position."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, x) if isinstance(self.layer, nn.Transformer) else self.layer(x)


def model_cases() -> dict[str, ModelCase]:
    """Return every case by its name."""
    cases = {name: ModelCase(build=_language(name), batch=_tokens) for name in LANGUAGE_MODELS}
    cases |= {
        name: ModelCase(build=_vision(name), batch=_images("pixel_values", 16)) for name in VISION_MODELS
    }
    cases |= {name: ModelCase(build=seeded(build), batch=batch) for name, (build, batch) in _others().items()}
    return cases


def loss_of(output: Any) -> Tensor:
    """Return the loss that an output holds, or one of all its floating-point tensors."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    parts = [output] if isinstance(output, Tensor) else list(_tensors(output))
    return torch.stack([part.float().square().mean() for part in parts if part.is_floating_point()]).sum()


def _tensors(output: Any) -> list[Tensor]:
    values = output.values() if isinstance(output, Mapping) else output
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


def _tokens(index: int) -> dict[str, Any]:
    tokens = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens, "labels": tokens}


def _images(name: str, size: int, **others: Any) -> Callable[[int], dict[str, Any]]:
    def batch(index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {name: torch.randn(2, 3, size, size, generator=generator), **others}

    return batch


def _floats(name: str, *shape: int) -> Callable[[int], dict[str, Any]]:
    return lambda index: {name: torch.randn(*shape, generator=torch.Generator().manual_seed(index))}


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build().eval()  # without dropout, whose masks no two ways to train share

    return seeded


def transformers_case(
    kind: str, config: Callable[[], Any], batch: Callable[[int], dict[str, Any]]
) -> ModelCase:
    """Return the case of a class of transformers, built from a configuration."""
    return ModelCase(build=seeded(lambda: getattr(transformers, kind)._from_config(config())), batch=batch)


def small(name: str, *, without: Collection[str] = (), **options: Any) -> Any:
    """Return a small configuration of one of transformers' kinds of models.

    Args:
        name: The kind.
        without: Of `SIZES`, what the kind computes by itself.
        options: What it has beside them.
    """
    kind = transformers.CONFIG_MAPPING[name]
    known = kind()
    chosen = {
        field: value
        for field, value in SIZES.items()
        if field not in without
        and (hasattr(known, field) or field == "vocab_size")
        and known.attribute_map.get(field) not in SIZES
        and (name, field) != ("falcon", "head_dim")  # computed there
    }
    return kind(**{**chosen, **options})


def _language(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = small(name)
        masked = transformers.AutoModelForMaskedLM
        kind = masked if type(config) in masked._model_mapping else transformers.AutoModelForCausalLM
        return (transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else kind).from_config(config)

    return seeded(build)


def _vision(name: str) -> Callable[[], nn.Module]:
    return seeded(lambda: transformers.AutoModel.from_config(small(name)))


def _others() -> dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]]:
    pixels = _images("pixel_values", 32)
    auto = transformers.AutoModel.from_config
    clip = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "resnet": (
            lambda: auto(small("resnet", hidden_sizes=[8, 16], depths=[1, 1], embedding_size=8)),
            pixels,
        ),
        "convnext": (
            lambda: auto(small("convnext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)),
            pixels,
        ),
        "swin": (
            lambda: auto(
                small("swin", image_size=32, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2)
            ),
            pixels,
        ),
        "clip_vision_model": (
            lambda: auto(transformers.CLIPVisionConfig(**clip, image_size=16, patch_size=4)),
            _images("pixel_values", 16),
        ),
        "wav2vec2": (
            lambda: auto(small("wav2vec2", **_SPEECH, **_POSITIONS, layerdrop=0.0)),
            _floats("input_values", 2, 400),
        ),
        "time_series_linear": (lambda: WithoutArguments(nn.Linear(6, 3)), _floats("x", 4, 6)),
        "transformer": (
            lambda: WithoutArguments(nn.Transformer(16, 2, 1, 1, 24, batch_first=True)),
            _floats("x", 2, 5, 16),
        ),
        "lstm": (
            lambda: WithoutArguments(nn.LSTM(8, 8, num_layers=2, bidirectional=True)),
            _floats("x", 5, 2, 8),
        ),
        "gru": (lambda: WithoutArguments(nn.GRU(8, 8, batch_first=True)), _floats("x", 2, 5, 8)),
        "convolutions": (
            lambda: WithoutArguments(
                nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.ConvTranspose2d(8, 3, 3))
            ),
            _images("x", 8),
        ),
        "weight_norm": (
            lambda: WithoutArguments(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
            _floats("x", 4, 8),
        ),
        "UNet2DModel": (
            lambda: diffusers.UNet2DModel(
                sample_size=16,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                attention_head_dim=4,
                **_CHANNELS,
            ),
            _images("sample", 16, timestep=3),
        ),
        "AutoencoderKL": (
            lambda: diffusers.AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                **_CHANNELS,
            ),
            _images("sample", 16),
        ),
        "VQModel": (
            lambda: diffusers.VQModel(block_out_channels=(8,), norm_num_groups=4),
            _images("sample", 16),
        ),
    }
