"""Transformers reads what is exported, and what it saves is loaded."""

from pathlib import Path

import pytest
import torch

from drivetrain_checkpoint import load_model, save_model
from optional_modules import import_later

transformers = import_later("transformers")  # transformers is not installed beside this package

KINDS = ["GPT2", "Llama"]
SIZES = ["5GB", "20KB"]


def language_model(kind: str, *, tied: bool, seed: int):
    """A small causal language model of random weights."""
    config = {
        "GPT2": transformers.GPT2Config(
            vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, tie_word_embeddings=tied
        ),
        "Llama": transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        ),
    }[kind]
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        is_same = torch.equal(one(tokens).logits, other(tokens).logits)
    left, right = one.state_dict(), other.state_dict()
    return (
        is_same and left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    )


@pytest.mark.parametrize("max_shard_size", SIZES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_reads_an_export(tmp_path: Path, kind: str, tied: bool, max_shard_size: str) -> None:
    model = language_model(kind, tied=tied, seed=0)
    plan = save_model(model, tmp_path, max_shard_size=max_shard_size)
    model.config.save_pretrained(tmp_path)
    assert plan.is_sharded == (max_shard_size == "20KB")
    assert len(plan.ties) == (1 if tied else 0)
    back, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same(back.eval(), model)
    assert (back.lm_head.weight is back.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("max_shard_size", SIZES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_save_pretrained_wrote_is_loaded(
    tmp_path: Path, kind: str, tied: bool, max_shard_size: str
) -> None:
    saved, model = (language_model(kind, tied=tied, seed=seed) for seed in (0, 1))
    saved.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").is_file() == (max_shard_size == "5GB")
    assert not same(saved, model)
    assert load_model(model, tmp_path) == ([], [])
    assert same(saved, model)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_an_export_and_what_save_pretrained_wrote_replace_one_another(tmp_path: Path) -> None:
    first, second, third = (language_model("Llama", tied=True, seed=seed) for seed in range(3))
    first.save_pretrained(tmp_path, max_shard_size="20KB")
    save_model(second, tmp_path)
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), second)
    third.save_pretrained(tmp_path, max_shard_size="20KB")
    save_model(second, tmp_path, max_shard_size="10KB")
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), second)
