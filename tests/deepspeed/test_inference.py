"""Models that a DeepSpeed engine runs without training: outputs are those of the plain model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain_deepspeed.inference import infer_with_deepspeed, zero_inference_config
from drivetrain_state import StateSettings, connect

transformers = pytest.importorskip("transformers")


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=32
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


WORDS = torch.arange(16).view(2, 8)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["tensor", "zero"])
def test_outputs_and_generated_tokens_are_those_of_the_model(way: Any) -> None:
    plain = llama()
    with torch.no_grad(), connect(StateSettings(device="cpu", watchdog=False)) as context:
        expected = plain(WORDS).logits
        tokens = plain.generate(
            WORDS, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(WORDS)
        )
        model: Any = infer_with_deepspeed(llama(), context=context, way=way)
        torch.testing.assert_close(model(WORDS).logits, expected, rtol=0, atol=1e-6)
        found = model.generate(
            WORDS, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(WORDS)
        )
        assert torch.equal(found, tokens)
        sizes = {name: p.numel() for name, p in model.named_parameters() if "q_proj" in name}
        whole = plain.model.layers[0].self_attn.q_proj.weight.numel()
        assert set(sizes.values()) == {
            whole // 2 if way == "tensor" else 0
        }  # gathered only while it computes


@pytest.mark.ranks(2)
def test_a_checkpoint_is_loaded_into_the_engine(tmp_path: Path) -> None:
    dispatch, files = pytest.importorskip("drivetrain_dispatch"), pytest.importorskip("safetensors.torch")
    folder = tmp_path / str(torch.distributed.get_rank())
    folder.mkdir()
    plain = llama()
    files.save_model(plain, str(folder / "model.safetensors"))
    with torch.no_grad(), connect(StateSettings(device="cpu", watchdog=False)):
        other = llama()
        for parameter in other.parameters():
            parameter.zero_()
        model = dispatch.load_checkpoint_and_dispatch(other, folder, engine="deepspeed")
        torch.testing.assert_close(model(WORDS).logits, plain(WORDS).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"kernels": True}, r"kernels=True on 'cpu': DeepSpeed's kernels need CUDA"),
        ({"way": "tensor", "offload_folder": Path("x")}, r"say way='zero'"),
    ],
)
def test_what_cannot_run_is_refused(said: dict[str, Any], words: str) -> None:
    context = connect(StateSettings(device="cpu", watchdog=False), needs_group=True)
    with context, pytest.raises(ValueError, match=words):
        infer_with_deepspeed(llama(), context=context, **said)


@pytest.mark.ranks(2)
def test_cut_layers_on_the_cpus_of_several_hosts_are_refused() -> None:
    with connect(StateSettings(device="cpu", watchdog=False)) as context:
        own = context.topology
        apart = replace(own, local_rank=0, local_world_size=1, node_rank=own.rank, num_nodes=2)
        with pytest.raises(ValueError, match=r"on the CPUs of 2 hosts.* say way='zero'"):
            infer_with_deepspeed(llama(), context=replace(context, topology=apart), way="tensor")


def test_weights_are_kept_on_the_host_or_on_a_disk() -> None:
    model = llama().bfloat16()
    on_host, on_disk = (zero_inference_config(model, 2, folder) for folder in (None, Path("fast")))
    assert on_host["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert on_disk["zero_optimization"]["offload_param"]["nvme_path"] == "fast"
    assert on_host["bf16"] == {"enabled": True}
