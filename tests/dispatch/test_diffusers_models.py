"""Models of Diffusers compute the same bits from a file of ours as from memory."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain_dispatch import disk_offload, load_checkpoint_and_dispatch
from optional_modules import import_later

diffusers = import_later("diffusers")
pytestmark = pytest.mark.usefixtures("one_thread")

Build = tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]
CROSS: dict[str, Any] = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 16, "norm_num_groups": 4,
    "attention_head_dim": 4, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
}  # fmt: skip
CODER: dict[str, Any] = {
    "block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4,
}  # fmt: skip
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8}


@pytest.fixture(autouse=True, scope="module")
def imported_models() -> None:
    """The models' modules, imported without the warnings of torchao 0.18 of its own escape sequences."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("UNet2DModel", "FluxTransformer2DModel"):
            getattr(diffusers, name)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape)


MODELS: dict[str, Build] = {
    "UNet2DModel": (
        lambda: diffusers.UNet2DModel(
            sample_size=16, block_out_channels=(32, 64), layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        lambda: {"sample": noise(2, 3, 16, 16), "timestep": 3},
    ),
    "UNet2DConditionModel": (
        lambda: diffusers.UNet2DConditionModel(
            sample_size=8, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **CROSS
        ),
        lambda: {"sample": noise(2, 4, 8, 8), "timestep": 3, "encoder_hidden_states": noise(2, 5, 16)},
    ),
    "AutoencoderKL": (
        lambda: diffusers.AutoencoderKL(latent_channels=4, **CODER),
        lambda: {"sample": noise(2, 3, 16, 16)},
    ),
    "VQModel": (
        lambda: diffusers.VQModel(num_vq_embeddings=32, **CODER),
        lambda: {"sample": noise(2, 3, 16, 16)},
    ),
    "DiTTransformer2DModel": (
        lambda: diffusers.DiTTransformer2DModel(
            in_channels=4, out_channels=8, num_layers=2, sample_size=8, num_embeds_ada_norm=10, **HEADS
        ),
        lambda: {
            "hidden_states": noise(2, 4, 8, 8), "timestep": torch.tensor([3, 4]), "class_labels": torch.tensor([1, 2])
        },
    ),
    "Transformer2DModel": (
        lambda: diffusers.Transformer2DModel(
            in_channels=16, num_layers=1, sample_size=8, cross_attention_dim=12, norm_num_groups=4, **HEADS
        ),
        lambda: {"hidden_states": noise(2, 16, 8, 8), "encoder_hidden_states": noise(2, 5, 12)},
    ),
    "SD3Transformer2DModel": (
        lambda: diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=2, joint_attention_dim=12,
            caption_projection_dim=16, pooled_projection_dim=12, out_channels=4, pos_embed_max_size=8, **HEADS,
        ),
        lambda: {
            "hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 5, 12),
            "pooled_projections": noise(2, 12), "timestep": torch.tensor([3, 4]),
        },
    ),
    "FluxTransformer2DModel": (
        lambda: diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
        ),
        lambda: {
            "hidden_states": noise(1, 16, 16), "encoder_hidden_states": noise(1, 4, 8),
            "pooled_projections": noise(1, 8), "timestep": torch.tensor([0.3]), "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(4, 3),
        },
    ),
    "UNet1DModel": (
        lambda: diffusers.UNet1DModel(block_out_channels=(32, 32, 64), extra_in_channels=64, sample_size=64),
        lambda: {"sample": noise(2, 2, 64), "timestep": 3},
    ),
    "ControlNetModel": (
        lambda: diffusers.ControlNetModel(conditioning_embedding_out_channels=(16, 32), **CROSS),
        lambda: {
            "sample": noise(2, 4, 8, 8), "timestep": 3, "encoder_hidden_states": noise(2, 5, 16),
            "controlnet_cond": noise(2, 3, 16, 16),
        },
    ),
    "PixArtTransformer2DModel": (
        lambda: diffusers.PixArtTransformer2DModel(
            in_channels=4, out_channels=8, num_layers=2, sample_size=8, cross_attention_dim=16, caption_channels=12,
            **HEADS,
        ),
        lambda: {
            "hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 5, 12),
            "timestep": torch.tensor([3, 4]), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
}  # fmt: skip


def outputs(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(5)
    with torch.inference_mode():
        return list(flat(model(**inputs, return_dict=False)))


def flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_bits_from_its_file(name: str, tmp_path: Path) -> None:
    build, make_inputs = MODELS[name]
    torch.manual_seed(0)
    model, inputs = build().eval(), make_inputs()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    expected = outputs(model, inputs)
    assert any(output.abs().max() > 0 for output in expected)
    disk_offload(model, tmp_path)
    for _ in range(2):
        for output, one in zip(outputs(model, inputs), expected, strict=True):
            assert torch.equal(output, one)


@pytest.mark.parametrize("shift", [0, 8])
def test_a_file_of_others_differs_in_the_last_bit_at_most(shift: int, tmp_path: Path) -> None:
    """A matrix times one vector, where the file's tensors begin at no multiples of 16 bytes."""
    build, make_inputs = MODELS["FluxTransformer2DModel"]
    torch.manual_seed(0)
    model, inputs = build().eval(), make_inputs()
    expected = outputs(model, inputs)
    metadata = {"format": "pt", "filled": "x" * shift}
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata)
    loaded = load_checkpoint_and_dispatch(copy.deepcopy(model), tmp_path, {"": "disk"})
    for output, one in zip(outputs(loaded, inputs), expected, strict=True):
        torch.testing.assert_close(output, one, rtol=1e-6, atol=1e-6)
