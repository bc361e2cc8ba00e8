"""Models of Hugging Face's transformers, dispatched: forward, generation with a cache, and training."""

import copy
from pathlib import Path

import pytest
import torch

from dispatch.models import assert_same_weights, copied
from drivetrain_dispatch.offload.dispatch import dispatch_model, offload_stats, remove_hooks
from optional_modules import import_later

transformers = import_later("transformers")

KINDS = {
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_key_value_heads": 2}),
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    kind, options = KINDS[request.param]
    config = getattr(transformers, kind)(**SIZES, **options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def generated(model: torch.nn.Module) -> torch.Tensor:
    prompt = torch.arange(3, 11).reshape(2, 4)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, use_cache=True
    )


@pytest.mark.default_cases("llama, tied", "mixtral-copied")
@pytest.mark.parametrize("way", ["disk", "copied", "whole layers"])
def test_generation_gives_the_same_tokens(model: torch.nn.Module, way: str, tmp_path: Path) -> None:
    plain = copy.deepcopy(model)
    dtypes = {name: tensor.dtype for name, tensor in model.named_parameters(remove_duplicate=False)}
    layers = {
        type(module).__name__
        for module in model.modules()
        if type(module).__name__.endswith(("Layer", "Block"))
    }
    dispatch_model(
        model,
        {"": "disk"},
        offload_dir=tmp_path,
        dtypes={} if way == "disk" else dtypes,
        preload_module_classes=layers if way == "whole layers" else (),
    )
    batch = torch.arange(8).reshape(2, 4)
    model(batch)  # the order is learnt
    missed = offload_stats(model).num_missed
    assert torch.equal(generated(model), generated(plain))
    ours, theirs = model(batch, labels=batch), plain(batch, labels=batch)
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.loss, theirs.loss)
    assert offload_stats(model).num_missed == missed
    remove_hooks(model)
    assert torch.equal(generated(model), generated(plain))


def test_a_model_is_trained_with_its_weights_away(model: torch.nn.Module) -> None:
    plain = copy.deepcopy(model)
    copied(model)
    batch = torch.arange(8).reshape(2, 4)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain)]
    for step in range(3):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            one.train()
            torch.manual_seed(step)  # of the dropout
            one(batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, plain)


def test_an_encoder_decoder_generates_as_in_memory() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    tokens = torch.tensor([[5, 6]])
    expected = model.generate(tokens, max_new_tokens=3)
    copied(model)
    assert torch.equal(model.generate(tokens, max_new_tokens=3), expected)
