"""Models that a DeepSpeed engine runs without training: outputs are those of the plain model."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_engines import has_libaio
from drivetrain_backends import AccumulationWindow, BackendNotInstalledError, SingleBackend
from drivetrain_deepspeed.inference import (
    fitting_way,
    infer_with_deepspeed,
    load_engine,
    zero_inference_config,
)
from drivetrain_precision import choose_policy
from drivetrain_state import ConnectError, Context, StateSettings, connect
from processes import Completed

transformers = pytest.importorskip("transformers")


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=32
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


WORDS = torch.arange(16).view(2, 8)


def one_rank() -> Context:
    return connect(StateSettings(device="cpu", watchdog=False), needs_group=True)


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["tensor", "zero"])
def test_parameters_get_the_dtype_and_buffers_keep_theirs(way: Any) -> None:
    plain = llama()
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad(), connect(StateSettings(device="cpu", watchdog=False)) as context:
        model: Any = infer_with_deepspeed(llama(), context=context, way=way, dtype=torch.bfloat16)
        torch.testing.assert_close(model(WORDS).logits, plain(WORDS).logits, rtol=0, atol=1e-2)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {b.dtype for b in model.buffers()} == {torch.float32}


@pytest.mark.ranks(2)
def test_a_model_that_deepspeed_cannot_cut_is_gathered() -> None:
    with torch.no_grad(), connect(StateSettings(device="cpu", watchdog=False)) as context:
        model: Any = infer_with_deepspeed(gpt2(), context=context)
        torch.testing.assert_close(model(WORDS).logits, gpt2()(WORDS).logits, rtol=0, atol=1e-6)
        with pytest.raises(ValueError, match=r"where to cut the layers of GPT2LMHeadModel; say way='zero'"):
            infer_with_deepspeed(gpt2(), context=context, way="tensor")


def test_an_engine_leaves_the_process_as_it_was() -> None:
    with torch.no_grad(), one_rank() as context:
        linear = torch.nn.functional.linear
        engine = infer_with_deepspeed(torch.nn.Linear(4, 2), context=context, way="zero")
        for _ in range(3):  # of which the second records what is gathered, and the third compares
            assert engine(torch.ones(1, 4)).shape == (1, 2)
        assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(os.environ)
        assert torch.nn.functional.linear is linear
        connect(StateSettings(device="cpu", watchdog=False)).close()
    assert not dist.is_initialized()


def test_an_engine_opens_no_group_and_ends_none() -> None:
    with pytest.raises(
        ConnectError, match=r"none is open: give the context of .* connect\(needs_group=True\)"
    ):
        load_engine(llama(), dtype=None, offload_folder=None)
    with connect(StateSettings(device="cpu")) as alone, pytest.raises(ConnectError, match="none is open"):
        infer_with_deepspeed(llama(), context=alone)
    assert not dist.is_initialized()
    with torch.no_grad(), one_rank():
        engine: Any = load_engine(llama(), dtype=None, offload_folder=None)
        torch.testing.assert_close(engine(WORDS).logits, llama()(WORDS).logits, rtol=0, atol=1e-6)
        assert dist.is_initialized()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"kernels": True}, r"kernels=True on 'cpu': DeepSpeed's kernels need CUDA"),
        ({"way": "tensor", "offload_folder": Path("x")}, r"say way='zero'"),
        ({"offload_folder": Path("x")}, r"torch.float32 on the CPU: DeepSpeed 0.19 would round them to bf16"),
        ({"way": "tp"}, r"way='tp': must be one of tensor, zero, or None"),
    ],
)
def test_what_cannot_run_is_refused(said: dict[str, Any], words: str) -> None:
    with one_rank() as context, pytest.raises(ValueError, match=words):
        infer_with_deepspeed(llama(), context=context, **said)


@pytest.mark.skipif(has_libaio(), reason="libaio and its headers are installed")
def test_a_folder_without_libaio_is_refused_by_its_package() -> None:
    with (
        one_rank() as context,
        pytest.raises(BackendNotInstalledError, match=r"^offload_folder='fast': .* libaio-dev"),
    ):
        infer_with_deepspeed(llama(), context=context, offload_folder=Path("fast"), dtype=torch.bfloat16)


OFFLOADED = """
import sys
from copy import deepcopy
from pathlib import Path
import torch
from drivetrain_deepspeed import infer_with_deepspeed
from drivetrain_state import StateSettings, connect
torch.manual_seed(0)
plain, x = torch.nn.Linear(1536, 1536).bfloat16(), torch.ones(2, 1536).bfloat16()  # smaller ones stay in memory
with torch.no_grad(), connect(StateSettings(device="cpu", watchdog=False)) as context:
    model = infer_with_deepspeed(deepcopy(plain), context=context, offload_folder=Path(sys.argv[1]))
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # an operator is compiled first
@pytest.mark.skipif(not has_libaio(), reason="DeepSpeed's engine for drives needs libaio and its headers")
def test_weights_in_a_folder_compute_as_in_memory(
    run_ranks_script: Callable[..., list[Completed]], tmp_path: Path
) -> None:
    for rank in run_ranks_script(OFFLOADED, str(tmp_path), timeout_seconds=550):
        assert rank.returncode == 0, rank.stderr
    assert any(path.stat().st_size for path in tmp_path.rglob("*.swp"))


@pytest.mark.parametrize(
    ("needed_bytes", "free_bytes", "world_size", "way"),
    [(100, 120, 1, "tensor"), (100, 119, 1, "zero"), (100, 60, 2, "tensor"), (100, 59, 2, "zero")],
)
def test_layers_are_cut_where_the_devices_hold_the_parts(
    needed_bytes: int, free_bytes: int, world_size: int, way: str
) -> None:
    assert fitting_way(needed_bytes, free_bytes, world_size) == way


@pytest.mark.ranks(2)
def test_cut_layers_on_the_cpus_of_several_hosts_are_refused() -> None:
    with connect(StateSettings(device="cpu", watchdog=False)) as context:
        own = context.topology
        apart = replace(own, local_rank=0, local_world_size=1, node_rank=own.rank, num_nodes=2)
        with pytest.raises(ValueError, match=r"on the CPUs of 2 hosts.* say way='zero'"):
            infer_with_deepspeed(llama(), context=replace(context, topology=apart), way="tensor")


def test_weights_are_kept_on_the_host_or_on_a_disk() -> None:
    on_host, on_disk = (zero_inference_config(torch.bfloat16, 2, folder) for folder in (None, Path("fast")))
    assert on_host["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert on_disk["zero_optimization"]["offload_param"]["nvme_path"] == "fast"
    assert on_host["bf16"] == {"enabled": True}


@pytest.mark.ranks(1)
def test_a_model_that_is_prepared_for_training_is_refused() -> None:
    with one_rank() as where:
        backend = SingleBackend(where, choose_policy("no", where.device), window=AccumulationWindow(1))
        (prepared,) = backend.prepare([torch.nn.Linear(2, 2)], [], [])
        with pytest.raises(ValueError, match=r"Linear is prepared for training.*a model of its own"):
            infer_with_deepspeed(prepared.model, context=where, way="zero")
        backend.close()
