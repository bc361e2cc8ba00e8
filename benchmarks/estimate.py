"""Estimates of a training step's memory beside what a step takes, for models of several kinds.

    uv run python benchmarks/estimate.py

The step is real, on the CPU; its peak is the kernel's own, above what the process held before the model was made.
"""

import gc
import json
import multiprocessing
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rounds import Table, parse_arguments, report, take_turns
from torch import nn
from torch.distributed.fsdp import fully_shard

from drivetrain_backends.modules.activation_checkpointing import checkpoint_activations
from drivetrain_backends.modules.wrap_policy import plan_blocks
from drivetrain_memory import record_peak
from drivetrain_plan.cli.estimate import EstimateArguments, run
from drivetrain_plan.model.huggingface import keep_no_cache, loss_of, training_inputs
from drivetrain_plan.model.source import ConfigSource
from drivetrain_plan.model.training_modes import MODES, OPTIMIZERS, TrainingMode

BATCH, TOKENS, LORA_RANK = 4, 256, 16
SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048}
TEXT = {**SIZES, "vocab_size": 8000, "max_position_embeddings": 512}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "Llama": {"model_type": "llama", **TEXT},
    "GPT-2": {"model_type": "gpt2", "n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 8000,
              "n_positions": 512, "bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0},
    "BERT classifier": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **TEXT,
                        "attention_probs_dropout_prob": 0.0},
    "T5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 512, "d_kv": 64,
           "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 8000, "decoder_start_token_id": 0},
    "ViT classifier": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 224,
                       **SIZES},
}  # fmt: skip
WAYS: Mapping[str, tuple[TrainingMode, bool]] = {
    **{mode.about: (mode, False) for mode in MODES.values()},
    "all in fp32, recomputed": (MODES["fp32"], True),
}
SHARDED = "Llama", "all in fp32"
RANKS = 2
NOTE = (
    f"Made on the CPU, {BATCH} samples of {TOKENS} tokens, with `torch.optim.AdamW(foreach=False)`: two steps in a "
    "fresh process each. The ratio is what the kernel saw to the estimate: above 1 is what the allocator and the "
    f"operators' own libraries take. The last table is rank 0 of {RANKS} under FSDP2, whose blocks are the model's "
    "layers."
)


def build(folder: Path, way: str) -> nn.Module:
    """Build the model of a way to train, without data."""
    mode, recompute = WAYS[way]
    model = ConfigSource(folder, lora_rank=LORA_RANK).build(mode).train(mode.trains)
    if recompute:
        blocks = plan_blocks(model, asked="fsdp.wrap").blocks
        checkpoint_activations([model.get_submodule(name) for name in blocks], "full")
        keep_no_cache(model)
    return model


def estimate(folder: Path, way: str, num_ranks: int = 1) -> int:
    """Return the peak that the command tells of a process, one of `num_ranks` that FSDP shards over, in bytes."""
    mode, recompute = WAYS[way]
    arguments = EstimateArguments(
        model=str(folder),
        mode=(mode.name,),
        batch=BATCH,
        seq=TOKENS,
        optimizer="adamw-loop",
        recompute=recompute,
        lora_rank=LORA_RANK,
        num_processes=num_ranks,
        json=True,
    )
    with redirect_stdout(StringIO()) as told:
        run(arguments)
    return json.loads(told.getvalue())["modes"][mode.name]["peak"]


def measure(folder: Path, way: str, answer: Any) -> None:
    """Train two real steps, or run two forwards; put the bytes of the peak."""
    _load_libraries()
    model = build(folder, way)
    gc.collect()
    with record_peak() as peak:
        _materialize(model)
        _run_steps(model, WAYS[way][0])
    answer.put(peak.host_bytes - peak.host_before_bytes)


def measure_rank(rank: int, folder: Path, way: str, port: int, answer: Any) -> None:
    """Train two real steps on shards; rank 0 puts the bytes of its peak."""
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    _load_libraries()
    model = build(folder, way)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    dist.barrier()
    gc.collect()
    with record_peak() as peak:
        _materialize(model)
        _run_steps(model, WAYS[way][0])
    if rank == 0:
        answer.put(peak.host_bytes - peak.host_before_bytes)
    dist.barrier()
    dist.destroy_process_group()


def _materialize(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(0.01)


def _run_steps(model: nn.Module, mode: TrainingMode) -> None:
    inputs = training_inputs(model, BATCH, TOKENS)
    if not mode.trains:
        with torch.no_grad():
            for _ in range(2):
                model(**inputs)
        return
    optimizer = OPTIMIZERS["adamw-loop"]([each for each in model.parameters() if each.requires_grad])
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
            loss = loss_of(model(**inputs))
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()


def _load_libraries() -> None:
    """Train a layer, so that the libraries of the operators and autograd's threads are there before the peak."""
    layer = torch.nn.Linear(64, 64)
    optimizer = OPTIMIZERS["adamw-loop"](list(layer.parameters()))
    for is_enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            loss = layer(torch.ones(64, 64)).float().logsumexp(0).sum()
        loss.backward()
        optimizer.step()


def measured(folder: Path, way: str, num_ranks: int = 1) -> int:
    """Return the peak of real steps, made in processes of their own."""
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.SimpleQueue()
    if num_ranks == 1:
        processes = [spawn.Process(target=measure, args=(folder, way, answer))]
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = [
            spawn.Process(target=measure_rank, args=(rank, folder, way, port, answer))
            for rank in range(num_ranks)
        ]
    for process in processes:
        process.start()
    found = answer.get()
    for process in processes:
        process.join()
    return found


def main() -> None:
    """Hold estimates against real steps, model by model."""
    arguments = parse_arguments(__doc__ or "", rounds=1)
    tables: list[Table] = []

    def compare(title: str, estimated: Callable[[], int], real: Callable[[], int]) -> None:
        turns = {"estimate": estimated, "measured": real}
        found = take_turns(turns, rounds=arguments.rounds, warmup=0, shown=False)
        tables.append(Table(title=title, unit="MB", measured=found))
        print(tables[-1], file=sys.stderr, flush=True)

    with TemporaryDirectory() as scratch:
        for name, config in CONFIGS.items():
            folder = Path(scratch) / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            for way in WAYS:
                compare(
                    f"{name}, {way}",
                    partial(estimate, folder, way),
                    partial(measured, folder, way),
                )
        name, way = SHARDED
        folder = Path(scratch) / name
        compare(
            f"{name}, {way}, sharded by FSDP2",
            partial(estimate, folder, way, RANKS),
            partial(measured, folder, way, RANKS),
        )
    report("estimate", tables, arguments, note=NOTE)


if __name__ == "__main__":
    main()
