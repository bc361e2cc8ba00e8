"""Pipelines of Diffusers, dispatched: their images, their files, and what users do to a pipeline."""

import copy
import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch.models import assert_same_weights
from drivetrain_dispatch import init_empty_weights
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.load_and_dispatch import load_checkpoint_and_dispatch
from drivetrain_dispatch.offload.cpu_offload import OffloadHook, cpu_offload_with_hook
from drivetrain_dispatch.offload.dispatch import dispatch_model, offload_stats, remove_hooks, trace_offload
from drivetrain_dispatch.offload.layerwise_casting import apply_layerwise_casting
from optional_modules import import_later

diffusers = import_later("diffusers")
pytestmark = pytest.mark.usefixtures("one_thread")
transformers = import_later("transformers")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIDE = 16  # pixels
WAYS = ["disk", "copied"]


@pytest.fixture(autouse=True, scope="module")
def imported_pipelines() -> None:
    """The pipelines' modules, imported without the warnings of torchao 0.18 of its own escape sequences."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "FluxPipeline"):
            getattr(diffusers, name)


def tokenizer(folder: Path) -> Any:
    """One that knows letters."""
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16
    )


def autoencoder() -> nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=SIDE,
        shift_factor=0.0,
    ).eval()


def stable_diffusion(folder: Path) -> Any:
    """A denoiser of convolutions, and a text encoder."""
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=SIDE // 2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=4,
        attention_head_dim=4,
    )
    text = transformers.CLIPTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=52, eos_token_id=53, pad_token_id=53,
    )  # fmt: skip
    return diffusers.StableDiffusionPipeline(
        vae=autoencoder(),
        text_encoder=transformers.CLIPTextModel(text).eval(),
        tokenizer=tokenizer(folder),
        unet=unet.eval(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def flux(_folder: Path) -> Any:
    """A denoiser of transformer blocks; its prompts are given as they are embedded."""
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer.eval(),
    )


@cache
def built(build: Callable[[Path], Any]) -> Any:
    torch.manual_seed(0)
    pipeline = build(Path(mkdtemp()))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(params=[stable_diffusion, flux])
def pipeline(request: pytest.FixtureRequest) -> Any:
    return copy.deepcopy(built(request.param))


@pytest.fixture
def unet_pipeline() -> Any:
    return copy.deepcopy(built(stable_diffusion))


def models(pipeline: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def denoiser(pipeline: Any) -> nn.Module:
    return getattr(pipeline, "unet", None) or pipeline.transformer


def dispatch(pipeline: Any, way: str, folder: Path) -> None:
    for name, model in models(pipeline).items():
        dtypes = {name: tensor.dtype for name, tensor in model.named_parameters(remove_duplicate=False)}
        dispatch_model(model, {"": "disk"}, offload_dir=folder / name, dtypes={} if way == "disk" else dtypes)


def image(pipeline: Any, **options: Any) -> Tensor:
    prompt: dict[str, Any] = {"prompt": "a cat"}
    if "transformer" in pipeline.components:
        generator = torch.Generator().manual_seed(5)
        prompt = {
            "prompt_embeds": torch.randn(1, 4, 8, generator=generator),
            "pooled_prompt_embeds": torch.randn(1, 8, generator=generator),
        }
    return pipeline(
        **prompt, **options, num_inference_steps=2, height=SIDE, width=SIDE, output_type="pt",
        generator=torch.Generator().manual_seed(3),
    ).images  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.default_cases("flux-disk")
def test_images_are_the_same_and_weights_come_before_they_are_used(
    pipeline: Any, way: str, tmp_path: Path
) -> None:
    expected = image(pipeline)  # which gives models an attribute of the pipeline's
    attributes = {name: set(vars(model)) for name, model in models(pipeline).items()}
    dispatch(pipeline, way, tmp_path)
    assert torch.equal(image(pipeline), expected)  # the order is learnt
    missed = {name: offload_stats(model).num_missed for name, model in models(pipeline).items()}
    with torch.inference_mode():
        assert torch.equal(image(pipeline), expected)
    assert {name: offload_stats(model).num_missed for name, model in models(pipeline).items()} == missed
    assert (offload_stats(pipeline.vae).num_used > 0) == (way == "copied")
    for model in models(pipeline).values():
        remove_hooks(model)
    assert torch.equal(image(pipeline), expected)  # they are pages of their file still
    assert {name: set(vars(model)) for name, model in models(pipeline).items()} == attributes
    for model in models(pipeline).values():
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    assert torch.equal(image(copy.deepcopy(pipeline)), expected)


def test_a_decoder_finds_its_weights_on_their_way(unet_pipeline: Any, tmp_path: Path) -> None:
    """An image is encoded and decoded in turns; neither is a forward."""
    vae, plain = unet_pipeline.vae, copy.deepcopy(unet_pipeline.vae)
    dispatch(unet_pipeline, "copied", tmp_path)
    pixels = torch.rand(1, 3, SIDE, SIDE)
    for turn in range(2):
        with torch.no_grad(), trace_offload(vae) as trace:
            latents = vae.encode(pixels).latent_dist.mean
            assert torch.equal(vae.decode(latents).sample, plain.decode(latents).sample)
        assert torch.equal(latents, plain.encode(pixels).latent_dist.mean)
        assert len(trace.uses) > 10
        if turn == 0:
            missed = offload_stats(vae).num_missed
    assert offload_stats(vae).num_missed == missed
    vae.enable_tiling()
    plain.enable_tiling()
    assert torch.equal(vae.decode(latents).sample, plain.decode(latents).sample)


def test_models_come_one_after_the_other(pipeline: Any) -> None:
    expected = image(pipeline)
    hook: OffloadHook | None = None
    hooks: list[OffloadHook] = []
    for model in models(pipeline).values():
        _, hook = cpu_offload_with_hook(model, "cpu", hook)
        hooks.append(hook)
    assert torch.equal(image(pipeline), expected)
    for hook in reversed(hooks):
        hook.remove()
    assert torch.equal(image(pipeline), expected)
    assert "decode" not in vars(pipeline.vae)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.default_cases("cpu-None-shards", "disk-fp16-one file")
def test_what_was_saved_is_loaded_from_its_folder(
    unet_pipeline: Any, tmp_path: Path, options: dict[str, str], variant: str | None, place: str
) -> None:
    saved = unet_pipeline.unet
    expected = image(unet_pipeline)
    saved.save_pretrained(tmp_path / "unet", variant=variant, **options)
    with init_empty_weights():
        loaded = type(saved).from_config(type(saved).load_config(tmp_path / "unet"))
    unet_pipeline.unet = load_checkpoint_and_dispatch(loaded.eval(), tmp_path / "unet", {"": place})
    assert_same_weights(loaded, saved)
    if place == "cpu":
        assert torch.equal(image(unet_pipeline), expected)
    else:  # the files' tensors do not begin at multiples of 64 bytes
        torch.testing.assert_close(image(unet_pipeline), expected, rtol=1e-5, atol=1e-5)


def test_a_denoiser_is_stored_in_eight_bits(pipeline: Any) -> None:
    model, expected = denoiser(pipeline), image(pipeline)
    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.float32)
    stored = {name for name, value in model.named_parameters() if value.dtype == torch.float8_e4m3fn}
    kept = {name for name, _ in model.named_parameters()} - stored
    assert {name for name, _ in model.named_parameters() if "norm" in name or "embed" in name} == kept
    assert len(stored) > 20
    rounded = image(pipeline.to("cpu"))
    assert not torch.equal(rounded, expected)
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0.5)
    remove_hooks(model)
    assert {value.dtype for name, value in model.named_parameters() if name in stored} == {
        torch.float8_e4m3fn
    }


class TestWhatUsersDo:
    """Something is done to a pipeline whose parts are dispatched: the result is right, or an error says why not."""

    @pytest.mark.parametrize("way", WAYS)
    def test_it_is_moved_to_where_it_is_and_not_copied(
        self, unet_pipeline: Any, way: str, tmp_path: Path
    ) -> None:
        expected = image(unet_pipeline)
        dispatch(unet_pipeline, way, tmp_path)
        with pytest.raises(OffloadedError, match="cannot be copied or pickled as a whole"):
            copy.deepcopy(unet_pipeline)
        assert torch.equal(image(unet_pipeline.to("cpu")), expected)
        assert unet_pipeline.device == torch.device("cpu")
        assert unet_pipeline.unet.dtype == torch.float32

    @pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")  # transformers
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.default_cases("disk")
    def test_it_is_saved(self, unet_pipeline: Any, way: str, tmp_path: Path) -> None:
        expected = image(unet_pipeline)
        dispatch(unet_pipeline, way, tmp_path)
        unet_pipeline.save_pretrained(tmp_path / "saved")
        again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "saved", safety_checker=None)
        for name, model in models(again).items():
            assert sorted(model.state_dict()) == sorted(getattr(unet_pipeline, name).state_dict())
        again.set_progress_bar_config(disable=True)
        assert torch.equal(image(again), expected)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_callback_uses_weights_and_changes_them(
        self, unet_pipeline: Any, way: str, tmp_path: Path
    ) -> None:
        def callback(pipeline: Any, _step: int, _time: int, values: dict[str, Any]) -> dict[str, Any]:
            weight = pipeline.unet.conv_in.weight
            seen.append(weight.sum() + pipeline.vae.decode(values["latents"]).sample.sum())
            with torch.no_grad():
                weight.mul_(1.5)
            return values

        plain = copy.deepcopy(unet_pipeline)
        dispatch(unet_pipeline, way, tmp_path)
        results: list[list[Tensor]] = []
        for one in (unet_pipeline, plain):
            seen: list[Tensor] = []
            result = image(one, callback_on_step_end=callback)
            results.append([result, *seen])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("way", WAYS)
    def test_its_parts_are_used_by_another_pipeline(
        self, unet_pipeline: Any, way: str, tmp_path: Path
    ) -> None:
        plain = copy.deepcopy(unet_pipeline)
        dispatch(unet_pipeline, way, tmp_path)
        images = [
            diffusers.StableDiffusionImg2ImgPipeline.from_pipe(one)(
                "a", image=torch.full((1, 3, SIDE, SIDE), 0.5), num_inference_steps=4, output_type="pt",
                generator=torch.Generator().manual_seed(3),
            ).images
            for one in (unet_pipeline, plain)
        ]  # fmt: skip
        assert torch.equal(*images)
