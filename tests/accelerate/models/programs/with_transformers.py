"""A program of transformers, as users of Accelerate write it; run with the interface installed."""

# ruff: noqa: I001 the interface comes before what imports accelerate

import sys
import tempfile
import warnings
from pathlib import Path

import accelerate
import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import AlignDevicesHook, remove_hook_from_module
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

assert "drivetrain_accelerate" in repr(accelerate)
warnings.simplefilter("ignore")
FOLDER = Path(tempfile.mkdtemp(dir=sys.argv[1]))
TOKENS = torch.arange(8)[None]
SPREAD = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
    "model.layers.2": "disk", "model.norm": "cpu", "lm_head": "disk",
}  # fmt: skip


def generated(model: torch.nn.Module) -> torch.Tensor:
    return model.generate(TOKENS, max_new_tokens=4, do_sample=False)


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(FOLDER / "llama", max_shard_size="20KB")
    return model


def check_llama(plain: LlamaForCausalLM, device_map: object, **options: object) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(FOLDER / "llama", device_map=device_map, **options)
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits), device_map
    assert torch.equal(generated(model), generated(plain)), device_map
    return model


with torch.no_grad():
    plain = llama()
    check_llama(plain, "auto")
    check_llama(plain, {"": "cpu"})
    check_llama(plain, "auto", max_memory={"cpu": "60KB"}, offload_folder=FOLDER / "planned")
    check_llama(plain, {"": "disk"}, offload_folder=FOLDER / "whole")
    spread = check_llama(plain, SPREAD, offload_folder=FOLDER / "spread")
    assert spread.hf_device_map == SPREAD
    assert isinstance(spread._hf_hook, AlignDevicesHook)
    assert spread._hf_hook.io_same_device
    layer = spread.model.layers[1].mlp.up_proj
    assert torch.device(layer._hf_hook.execution_device) == torch.device("cpu")
    assert torch.equal(layer._old_forward(torch.ones(1, 32)), layer(torch.ones(1, 32)))
    assert not hasattr(spread.model.layers[1].mlp, "_hf_hook")  # holds no weights itself
    # What is saved has the values of the weights on the disk.
    spread.save_pretrained(FOLDER / "saved")
    again = LlamaForCausalLM.from_pretrained(FOLDER / "saved")
    assert torch.equal(again(TOKENS).logits, plain(TOKENS).logits)
    # Ordinary again, then dispatched by another map.
    remove_hook_from_module(spread, recurse=True)
    assert not any(
        hasattr(module, "_hf_hook") or hasattr(module, "_old_forward") for module in spread.modules()
    )
    assert torch.equal(spread(TOKENS).logits, plain(TOKENS).logits)
    planned = infer_auto_device_map(
        spread, {"cpu": "50KB"}, no_split_module_classes=["LlamaDecoderLayer", "Other"]
    )
    assert set(planned.values()) == {"cpu", "disk"}
    dispatch_model(spread, planned, offload_dir=FOLDER / "again")
    assert torch.equal(generated(spread), generated(plain))

    # As transformers does for parameters that its maps leave out: they stay where they are.
    remove_hook_from_module(spread, recurse=True)
    given = accelerate.big_modeling.check_device_map
    accelerate.big_modeling.check_device_map = lambda *_, **__: None
    dispatch_model(
        spread, {name: SPREAD[name] for name in SPREAD if name != "lm_head"}, offload_dir=FOLDER / "left"
    )
    accelerate.big_modeling.check_device_map = given
    assert torch.equal(spread(TOKENS).logits, plain(TOKENS).logits)
    assert accelerate.hooks.DispatchedHook in type(spread._hf_hook).__mro__

    # An encoder-decoder, to whose encoder generate adds a hook, and whose embeddings are tied.
    t5 = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    ).eval()
    t5.save_pretrained(FOLDER / "t5")
    parts = {"shared": "cpu", "encoder": "disk", "decoder": "cpu", "lm_head": "cpu"}
    loaded = T5ForConditionalGeneration.from_pretrained(
        FOLDER / "t5", device_map=parts, offload_folder=FOLDER / "t5_disk"
    )
    assert torch.equal(generated(loaded), generated(t5))
    assert loaded.encoder._hf_hook.io_same_device
    loaded.resize_token_embeddings(70)
    assert generated(loaded).shape == generated(t5).shape
print("as without")
