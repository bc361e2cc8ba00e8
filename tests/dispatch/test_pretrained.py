"""`load_pretrained` gives the model that the library's own `from_pretrained` gives, wherever its weights are."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drivetrain_dispatch import (
    BitsAndBytes8Bit,
    DeviceMapError,
    OffloadedError,
    WeightFilesError,
    WeightsMismatchError,
    load_pretrained,
    remove_hooks,
)
from optional_modules import import_later

diffusers = import_later("diffusers")
transformers = pytest.importorskip("transformers")

PLACES: dict[str, dict[str, Any]] = {
    "planned": {},
    "host": {"device_map": {"": "cpu"}},
    "disk": {"device_map": {"": "disk"}},
    "half on the disk": {"max_memory": {"cpu": "60kB"}},
    "not dispatched": {"device_map": None},
}
TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def load(folder: Path, **options: Any) -> Any:
    return load_pretrained(transformers.AutoModelForCausalLM, folder, **options)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts in bf16, with settings for generation."""
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    model.generation_config.max_new_tokens = 7
    model.generation_config.repetition_penalty = 1.5
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, pad_token_id=0)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small autoencoder of diffusers."""
    folder = tmp_path_factory.mktemp("autoencoder")
    torch.manual_seed(0)
    diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).save_pretrained(folder)
    return folder


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, those of no checkpoint too."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.default_cases("AutoModelForCausalLM", "MixtralForCausalLM-planned")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model_class", [transformers.AutoModelForCausalLM, transformers.MixtralForCausalLM])
def test_a_language_model_is_what_from_pretrained_gives(
    mixtral: Path, tmp_path: Path, model_class: Any, place: str
) -> None:
    wanted = model_class.from_pretrained(mixtral)
    model = load_pretrained(model_class, mixtral, offload_folder=tmp_path, **PLACES[place])
    ids = torch.tensor([[3, 4, 5]])

    assert type(model) is type(wanted)
    assert not model.training
    assert model.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert model.config.to_dict() == wanted.config.to_dict()
    assert torch.equal(model.generate(ids), wanted.generate(ids))
    remove_hooks(model)
    expected = tensors_of(wanted)
    assert tensors_of(model).keys() == expected.keys()
    for name, tensor in tensors_of(model).items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_classes_that_keep_modules_in_fp32_do(tmp_path: Path, dtype: torch.dtype) -> None:
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    wanted = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype)
    model = load_pretrained(transformers.AutoModelForSeq2SeqLM, tmp_path, dtype=dtype)
    found = {name: tensor.dtype for name, tensor in model.named_parameters()}
    assert found == {name: tensor.dtype for name, tensor in wanted.named_parameters()}
    assert (torch.float32 in found.values()) is (dtype != torch.bfloat16)


def test_layers_that_the_class_keeps_whole_are_not_split(mixtral: Path, tmp_path: Path) -> None:
    model = load(mixtral, max_memory={"cpu": "60kB"}, offload_folder=tmp_path)
    inside = [
        name for name in model.hf_device_map if name.startswith("model.layers.") and name.count(".") > 2
    ]
    assert not inside
    assert "disk" in model.hf_device_map.values()


def test_a_configuration_can_be_given(mixtral: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(mixtral)
    config.rope_parameters["rope_theta"] = 500.0
    model = load(mixtral, config=config)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(mixtral, config=config)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(model.generate(ids), wanted.generate(ids))


@pytest.mark.parametrize("dtype", ["auto", torch.float16])
def test_a_diffusers_model_is_what_from_pretrained_gives(tmp_path: Path, dtype: Any) -> None:
    torch.manual_seed(0)
    levels = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    diffusers.AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, **levels).save_pretrained(tmp_path)
    options = {} if dtype == "auto" else {"torch_dtype": dtype}
    wanted = diffusers.AutoencoderKL.from_pretrained(tmp_path, **options)
    model = load_pretrained(diffusers.AutoencoderKL, tmp_path, device_map={"": "disk"}, dtype=dtype)
    remove_hooks(model)
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize("kind", ["DiTTransformer2DModel", "SD3Transformer2DModel"])
def test_positions_of_a_diffusers_model_have_the_dtype_that_the_library_gives_them(
    tmp_path: Path, kind: str
) -> None:
    """No file holds those of DiT, which its constructor makes in fp32; one holds SD3's."""
    torch.manual_seed(0)
    options: dict[str, Any] = (
        {} if kind.startswith("DiT") else {"joint_attention_dim": 8, "pos_embed_max_size": 8}
    )
    model_class = getattr(diffusers, kind)
    model_class(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, in_channels=4, sample_size=8, **options
    ).save_pretrained(tmp_path)
    wanted = model_class.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    model = load_pretrained(model_class, tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    for name, buffer in wanted.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
        assert model.get_buffer(name).dtype == buffer.dtype
    assert {name for name, _ in wanted.named_buffers()} == {"pos_embed.pos_embed"}


# ---- what cannot be


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json: .*snapshot_download"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        load(tmp_path)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a pipeline of several models: .* from vae"):
        load(tmp_path)


def test_weights_without_their_configuration_or_index_are_told(mixtral: Path, tmp_path: Path) -> None:
    shutil.copytree(mixtral, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightFilesError, match=r"holds \d+ shards, .* no \*\.safetensors\.index\.json"):
        load(tmp_path / "model")
    with pytest.raises(ValueError, match="is a file: name the folder"):
        load(tmp_path / "model" / "config.json")
    with pytest.raises(TypeError, match=r"folder=<class .*the model class comes first"):
        load_pretrained(tmp_path, transformers.AutoModelForCausalLM)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="offload_folder=3"):
        load(mixtral, offload_folder=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"torch_dtype": torch.bfloat16}, "give dtype"),
        ({"max_memmory": {"cpu": "1GB"}}, "did you mean max_memory"),
        ({"load_in_4bit": True}, r"give quantization=BitsAndBytes4Bit\(\)"),
        ({"offload_dir": "x"}, "give offload_folder"),
        ({"subfolder": "x"}, "give the folder itself"),
    ],
)
@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_options_that_nobody_knows_are_refused(
    mixtral: Path, autoencoder: Path, library: str, options: dict[str, Any], hint: str
) -> None:
    model_class, folder = {
        "transformers": (transformers.AutoModelForCausalLM, mixtral),
        "diffusers": (diffusers.AutoencoderKL, autoencoder),
    }[library]
    with pytest.raises(TypeError, match=f"{next(iter(options))!r} is .*{hint}"):
        load_pretrained(model_class, folder, **options)


def test_options_of_the_class_and_fields_of_the_configuration_are_handed_on(mixtral: Path) -> None:
    config = load(mixtral, attn_implementation="eager", num_experts_per_tok=1).config
    assert (config._attn_implementation, config.num_experts_per_tok) == ("eager", 1)


def test_a_folder_of_another_class_is_told(mixtral: Path, autoencoder: Path) -> None:
    with pytest.raises(ValueError, match="describes a AutoencoderKL, not a UNet2DModel"):
        load_pretrained(diffusers.UNet2DModel, autoencoder)
    with pytest.raises(ValueError, match="does not describe a"):
        load(autoencoder)


def test_a_variant_is_taken_if_it_is_named(autoencoder: Path, tmp_path: Path) -> None:
    shutil.copytree(autoencoder, tmp_path / "both")
    zeros = {
        name: torch.zeros_like(tensor)
        for name, tensor in load_file(next(autoencoder.glob("*.safetensors"))).items()
    }
    save_file(zeros, tmp_path / "both" / "diffusion_pytorch_model.fp16.safetensors")
    plain = load_pretrained(diffusers.AutoencoderKL, tmp_path / "both")
    variant = load_pretrained(diffusers.AutoencoderKL, tmp_path / "both", variant="fp16")
    assert any(tensor.any() for tensor in plain.state_dict().values())
    assert not any(tensor.any() for tensor in variant.state_dict().values())
    with pytest.raises(WeightFilesError, match="variant='bf16'"):
        load_pretrained(diffusers.AutoencoderKL, tmp_path / "both", variant="bf16")


def test_packed_weights_are_not_saved_over_those_in_full(llama: Path) -> None:
    pytest.importorskip("bitsandbytes")
    before = (llama / "model.safetensors").read_bytes()
    model = load(llama, quantization=BitsAndBytes8Bit())
    with pytest.raises(OffloadedError, match="what no library reads"):
        model.save_pretrained(llama)
    assert (llama / "model.safetensors").read_bytes() == before


def test_what_an_earlier_load_wrote_and_somebody_cut_is_written_anew(mixtral: Path, tmp_path: Path) -> None:
    how = {"device_map": {"": "disk"}, "offload_folder": tmp_path}
    ids = torch.tensor([[3, 4, 5]])
    wanted = load(mixtral, **how).generate(ids)
    (written,) = tmp_path.iterdir()
    os.truncate(written, 100)
    assert torch.equal(load(mixtral, **how).generate(ids), wanted)


def test_a_class_of_another_library_is_refused(mixtral: Path) -> None:
    for other in (
        nn.Linear,
        transformers.AutoConfig,
        "LlamaForCausalLM",
        transformers.MixtralForCausalLM.from_pretrained,
    ):
        with pytest.raises(TypeError, match="give a model class of transformers"):
            load_pretrained(other, mixtral)  # type: ignore[type-var]


def test_weights_that_another_library_packed_are_refused(mixtral: Path, tmp_path: Path) -> None:
    config = json.loads((mixtral / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"the weights are packed \(gptq\)"):
        load(tmp_path)


def test_a_head_that_the_checkpoint_or_the_model_lacks_is_told(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatchError, match=r"1 unexpected: 'lm_head\.weight'"):
        load_pretrained(transformers.AutoModel, llama)
    model = load_pretrained(transformers.AutoModel, llama, strict=False)
    wanted = transformers.AutoModel.from_pretrained(llama)
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    wanted.save_pretrained(tmp_path)
    load_pretrained(transformers.AutoModel, tmp_path)
    with pytest.raises(WeightsMismatchError, match=r"1 missing: 'lm_head\.weight'"):
        load(tmp_path)


def test_budgets_that_cannot_be_met_are_told(mixtral: Path) -> None:
    with pytest.raises(DeviceMapError, match="max_memory"):
        load(mixtral, max_memory={"cpu": "1kB", "disk": "1kB"})
    with pytest.raises(ValueError, match="dtype"):
        load(mixtral, dtype="bfloat16")  # type: ignore[arg-type]


# ---- where transformers looks at what was dispatched


@pytest.mark.parametrize(
    "how",
    [{}, {"device_map": {"": "disk"}}, {"device_map": {"model.embed_tokens": "disk", "": "cpu"}}],
    ids=["host", "disk", "disk first"],
)
def test_a_pipeline_takes_a_dispatched_model(llama: Path, how: dict[str, Any]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")

    def said(model: Any) -> object:
        pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        return pipeline("w3 w4", max_new_tokens=5, do_sample=False)

    model_class = transformers.AutoModelForCausalLM
    assert said(load_pretrained(model_class, llama, **how)) == said(model_class.from_pretrained(llama))


def test_the_map_that_others_see_begins_with_a_device_that_computes(mixtral: Path, tmp_path: Path) -> None:
    parts = {"lm_head": "disk", "model.norm": "disk", "model.embed_tokens": "cpu", "": "disk"}
    model = load(mixtral, device_map=parts, offload_folder=tmp_path)
    assert next(iter(model.hf_device_map.items())) == ("model.embed_tokens", "cpu")
    assert model.hf_device_map == parts
