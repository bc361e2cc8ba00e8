"""Adapters of peft on a dispatched base; with the argument "npu" on the tests' accelerator."""

# ruff: noqa: I001, E402, F401 the interface comes before what imports accelerate

import drivetrain_accelerate.auto

import copy
import sys
import warnings
from pathlib import Path

import torch

ON_ACCELERATOR = sys.argv[2:] == ["npu"]
if ON_ACCELERATOR:
    from hardware.simulated import device

    device.make(device.NPU)
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
FOLDER = Path(sys.argv[1])
TOKENS = torch.arange(8)[None]
MAIN = 0 if ON_ACCELERATOR else "cpu"
BUDGETS = {0: "1GB", "cpu": "1GB"} if ON_ACCELERATOR else None


def map_of(place: object) -> dict[str, object]:
    parts = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    return {**dict.fromkeys(parts, MAIN), "model.layers.1": place, "model.layers.2": place}


def loaded(place: object) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(
        FOLDER / "base", device_map=map_of(place), offload_folder=FOLDER / "disk"
    )


def check(model: torch.nn.Module, expected: torch.Tensor) -> None:
    output = model(TOKENS).logits
    assert output.device.type == "cpu"  # that of the inputs
    torch.testing.assert_close(output, expected, atol=1e-6 if ON_ACCELERATOR else 0, rtol=0)


config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
torch.manual_seed(0)
plain = LlamaForCausalLM(config).eval()
plain.save_pretrained(FOLDER / "base")
adapters = get_peft_model(
    copy.deepcopy(plain), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
).eval()
adapters.save_pretrained(FOLDER / "adapters")
with torch.no_grad():
    expected = adapters(TOKENS).logits
    merged = copy.deepcopy(adapters).merge_and_unload()(TOKENS).logits
    for place in ("disk", "cpu") if ON_ACCELERATOR else ("disk",):
        named = {f"base_model.model.{name}": where for name, where in map_of(place).items()}
        model = PeftModel.from_pretrained(
            loaded(place),
            FOLDER / "adapters",
            device_map=named,
            max_memory=BUDGETS,
            offload_folder=FOLDER / "disk",
        ).eval()
        assert model.get_base_model()._hf_hook.io_same_device
        check(model, expected)
        check(model.merge_and_unload(), merged)
        # Adapters of a base that is dispatched already, and a head that is trained with them.
        torch.manual_seed(0)
        check(
            get_peft_model(loaded(place), LoraConfig(r=4, target_modules=["q_proj"])).eval(),
            plain(TOKENS).logits,
        )
        with_head = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
        check(get_peft_model(loaded(place), with_head).eval(), plain(TOKENS).logits)
if not ON_ACCELERATOR:
    trained = get_peft_model(loaded("disk"), LoraConfig(r=4, target_modules=["q_proj"]))
    trained(TOKENS, labels=TOKENS).loss.backward()
    assert all(each.grad is not None for each in trained.parameters() if each.requires_grad)
print("as without")
