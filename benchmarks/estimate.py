"""Estimates of a training step's memory beside what a step takes, for models of several kinds.

    uv run python benchmarks/estimate.py

The step is real, on the CPU; its peak is the kernel's own, above what the process held before the model was made.
"""

import gc
import json
import multiprocessing
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rounds import Table, parse_arguments, report, take_turns

from drivetrain_dispatch.cli.training_step import build_to_train, loss_of, training_inputs
from drivetrain_dispatch.compat import FakeTensorMode
from drivetrain_dispatch.estimate.fake_tensors import give_fake_tensors
from drivetrain_dispatch.estimate.step_memory import measure_step
from drivetrain_dispatch.estimate.training_modes import MODES, OPTIMIZERS
from drivetrain_memory import record_peak

BATCH, TOKENS = 8, 256
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
WAYS = {
    "fp32": ("fp32", False),
    "fp32, recomputed": ("fp32", True),
    "mixed": ("mixed", False),
    "bf16": ("bf16", False),
}
NOTE = (
    "Made on the CPU with `torch.optim.AdamW(foreach=False)`, two steps in a fresh process each. The ratio is what "
    "the kernel saw to the estimate: above 1 is what the allocator and the operators' own libraries take."
)


def estimate(folder: Path, way: str) -> int:
    """Estimate the peak of a step, in bytes."""
    name, recompute = WAYS[way]
    model = build_to_train(folder, dtype=MODES[name].dtype, recompute=recompute)
    with FakeTensorMode():
        give_fake_tensors(model)
        inputs = training_inputs(model, BATCH, TOKENS)
        return measure_step(
            model,
            inputs,
            loss_of=loss_of,
            make_optimizer=OPTIMIZERS["adamw-loop"],
            autocast=MODES[name].autocast,
        ).peak


def measure(folder: Path, way: str, answer: Any) -> None:
    """Train two real steps; put the bytes of the peak."""
    _load_libraries()
    name, recompute = WAYS[way]
    model = build_to_train(folder, dtype=MODES[name].dtype, recompute=recompute)
    gc.collect()
    with record_peak() as peak:
        model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach().fill_(0.01)
        optimizer = OPTIMIZERS["adamw-loop"](list(model.parameters()))
        inputs = training_inputs(model, BATCH, TOKENS)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=MODES[name].autocast is not None):
                loss = loss_of(model(**inputs))
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    answer.put(peak.host_bytes - peak.host_before_bytes)


def _load_libraries() -> None:
    """Train a layer, so that the libraries of the operators and autograd's threads are there before the peak."""
    layer = torch.nn.Linear(64, 64)
    optimizer = OPTIMIZERS["adamw-loop"](list(layer.parameters()))
    for is_enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            loss = layer(torch.ones(64, 64)).float().logsumexp(0).sum()
        loss.backward()
        optimizer.step()


def measured(folder: Path, way: str) -> int:
    """Return the peak of real steps, made in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.SimpleQueue()
    process = spawn.Process(target=measure, args=(folder, way, answer))
    process.start()
    found = answer.get()
    process.join()
    return found


def main() -> None:
    """Hold estimates against real steps, model by model."""
    arguments = parse_arguments(__doc__ or "", rounds=1)
    tables: list[Table] = []
    with TemporaryDirectory() as scratch:
        for name, config in CONFIGS.items():
            folder = Path(scratch) / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            for way in WAYS:
                turns = {
                    "estimate": lambda folder=folder, way=way: estimate(folder, way),
                    "measured": lambda folder=folder, way=way: measured(folder, way),
                }
                found = take_turns(turns, rounds=arguments.rounds, warmup=0, shown=False)
                tables.append(Table(title=f"{name}, {way}", unit="MB", measured=found))
                print(tables[-1], file=sys.stderr, flush=True)
    report("estimate", tables, arguments, note=NOTE)


if __name__ == "__main__":
    main()
