"""Activations that are recomputed, and blocks that are compiled: the peak of memory and the time of a step.

    uv run --group bench python benchmarks/recompute_and_compile.py

Each contestant trains in a process of its own: a Llama of 8 blocks of width 256, four samples of 256 tokens in fp32,
by AdamW. The peak is that of the process above what it held when the model had taken its first steps, in a run whose
heap gives back what it is given; compilation is the time of the first two steps beyond two later ones.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rounds import RESULTS, Table, report, take_turns

from drivetrain_memory import record_peak

STEPS = 8
PLAIN = "drivetrain, nothing changed"
WAYS: dict[str, dict[str, str]] = {
    PLAIN: {},
    "drivetrain, selective": {"activation_checkpointing": "selective"},
    "drivetrain, full": {"activation_checkpointing": "full"},
    "drivetrain, compile blocks": {"compile": "blocks"},
    "drivetrain, compile whole": {"compile": "whole"},
}
GRADIENT, REGIONS = "transformers, gradient_checkpointing_enable", "Accelerate, use_regional_compilation"


def model_of() -> Any:
    """The model, with values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2000, use_cache=False, **sizes))


def stepped(name: str) -> Callable[[], None]:
    """Return what a contestant does in a step."""
    model: Any = model_of()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.arange(1024).view(4, 256) % 2000
    if name in WAYS:
        from drivetrain import Accelerator

        sections = {"run": {"show_plan": False}, "model": WAYS[name]}
        accelerator: Any = Accelerator(cpu=True, backend="single", sections=sections)
    else:
        from accelerate.utils import TorchDynamoPlugin

        from accelerate import Accelerator as Peer

        regions = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        accelerator = Peer(cpu=True, dynamo_plugin=regions if name == REGIONS else None)
        if name == GRADIENT:
            model.gradient_checkpointing_enable()
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(name: str) -> None:
    """Print the peak of a step in bytes, the seconds of one, and those of compilation."""
    step = stepped(name)
    seconds = list[float]()
    for _ in range(2):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    first = sum(seconds)
    with record_peak(children=False) as peak:
        for _ in range(STEPS):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
    usual = statistics.median(seconds[2:])
    print(json.dumps([peak.host_bytes - peak.host_before_bytes, usual, first - 2 * usual]))


def measured(name: str, **environment: str) -> list[float]:
    """What a process of its own prints."""
    run = subprocess.run(
        [sys.executable, __file__, "--worker"],
        input=name, capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    """Measure every contestant, in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(sys.stdin.read())
        return
    names = [*WAYS, GRADIENT, REGIONS]
    times: dict[str, list[float]] = {name: [] for name in names}
    compiling: dict[str, list[float]] = {name: [] for name in names}

    def turn(name: str) -> float:
        peak, _, _ = measured(name, MALLOC_MMAP_THRESHOLD_="65536")
        _, usual, compiled = measured(name)
        times[name].append(usual)
        compiling[name].append(compiled)
        return peak

    peaks = take_turns(
        {name: lambda name=name: turn(name) for name in names}, rounds=arguments.rounds, warmup=0
    )
    first = "; ".join(f"{name}: {statistics.median(each):.1f} s" for name, each in compiling.items())
    tables = [
        Table(title="Peak of a step", unit="MB", measured=peaks),
        Table(title="Time of a step", unit="ms", measured=times),
    ]
    report("recompute_and_compile", tables, arguments, note=f"First steps beyond later ones: {first}.")


if __name__ == "__main__":
    main()
