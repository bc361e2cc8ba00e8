"""Replicas that train apart against data parallelism: the loss after the same samples, bytes exchanged, and time.

    uv run --group bench python benchmarks/local_updates.py

Two ranks over gloo on the CPU, a thread each, train the byte model of examples/train_bytes.py on the source code of
Python's standard library. All ways see the same samples in the same order; a way's loss is that of its weights on
files that none has seen. The kernel counts all that the host sends over loopback: run nothing else beside it.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rounds import RESULTS, found_by_ranks, report
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_bytes import GPT, read_windows, window_losses, write_tokens

from drivetrain import Accelerator

BATCH, BLOCK, WIDTH, LAYERS, WARM = 8, 64, 128, 3, 40
OUTER = partial(SGD, lr=0.7, momentum=0.5, nesterov=True)
PAPER = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)  # for hundreds of steps between two exchanges
LATE = {"every": 20, "outer": OUTER, "fragments": 4, "delay": 2}


class Way(NamedTuple):
    """How replicas train apart, after a share of the steps by data parallelism; None does not part them."""

    said: Mapping[str, Any] | None
    begins: float = 0.25


WAYS: Mapping[str, Way] = {
    "DDP": Way(None),
    "local SGD from the start": Way({"every": 20}, begins=0.0),
    "DiLoCo from the start": Way({"every": 20, "outer": OUTER}, begins=0.0),
    "local SGD": Way({"every": 20}),
    "DiLoCo": Way({"every": 20, "outer": OUTER}),
    "DiLoCo, momentum 0.9": Way({"every": 20, "outer": PAPER}),
    "DiLoCo, 4 fragments": Way({"every": 20, "outer": OUTER, "fragments": 4}),
    "DiLoCo, 4 fragments, 2 steps late": Way(LATE),
}


def sent_by_host() -> int:
    """Return the bytes that the kernel has sent over this host's loopback, where the ranks meet."""
    (line,) = [one for one in Path("/proc/net/dev").read_text().splitlines() if one.strip().startswith("lo:")]
    return int(line.split()[9])


def train(folder: Path, way: Way, num_steps: int) -> dict[str, float]:
    """Train in one way as one of the ranks; return its loss, the bytes of a step and its seconds."""
    accelerator = Accelerator(backend="ddp", cpu=True, sections={"run": {"show_plan": False}})
    torch.manual_seed(0)
    model: Any = GPT(block_size=BLOCK, width=WIDTH, num_layers=LAYERS)
    optimizer: Any = AdamW(model.parameters(), 2e-3, betas=(0.9, 0.99), weight_decay=0.1)
    schedule: Any = LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM, 0.525 + 0.475 * math.cos(math.pi * step / num_steps))
    )
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    windows = read_windows(folder / "train.bin", BLOCK)
    drawn = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))
    of_ranks = drawn[: num_steps * BATCH * 2].view(num_steps, 2, BATCH)

    def steps(part: Tensor) -> None:
        for rows in part[:, accelerator.process_index]:
            accelerator.backward(window_losses(model, torch.from_numpy(windows[rows.numpy()])).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    first = 0 if way.said is None else int(num_steps * way.begins)
    local = None if way.said is None else accelerator.local_updates(model, **way.said)
    steps(of_ranks[:first])
    dist.barrier()
    begun, wired = time.perf_counter(), sent_by_host()
    if local is None:
        steps(of_ranks)
        sent = num_steps * sum(p.numel() * p.itemsize for p in model.parameters())
    else:
        with local:
            steps(of_ranks[first:])
        sent = local.sent_bytes
    dist.barrier()
    num_apart = num_steps - first
    seconds, wired = (time.perf_counter() - begun) / num_apart, sent_by_host() - wired
    loss = float(validation(accelerator.unwrap_model(model), folder))
    accelerator.end_training()
    return {"loss": loss, "bytes": sent / num_apart, "wired": wired / num_apart, "seconds": seconds}


@torch.no_grad()
def validation(model: GPT, folder: Path) -> Tensor:
    """Return the mean loss, in nats a byte, of windows that no way has trained on."""
    windows = read_windows(folder / "validation.bin", BLOCK)
    chosen = torch.from_numpy(windows[:: max(1, len(windows) // 1024)][:1024])
    return torch.cat([window_losses(model, part) for part in chosen.split(128)]).mean()


def work(arguments: argparse.Namespace) -> None:
    """What each rank does; rank 0 writes down what it found."""
    dist.init_process_group("gloo")
    found: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        found[name] = train(arguments.folder, way, arguments.steps)
        if dist.get_rank() == 0:
            print(name, found[name], file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # threads of several groups do not survive the interpreter's end


def main() -> None:
    """Train in every way, and write the table."""
    parser = argparse.ArgumentParser(description="Replicas that train apart against data parallelism.")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps of each way")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    for name in ("--out", "--folder"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(rounds=1)
    arguments = parser.parse_args()
    if arguments.out:
        work(arguments)
        return
    with TemporaryDirectory() as folder:
        write_tokens(Path(folder))
        found: dict[str, dict[str, float]] = found_by_ranks(
            2, "--folder", folder, "--steps", str(arguments.steps)
        )
    base = found["DDP"]
    lines = [
        "| | loss | to DDP | bytes a step | to DDP | by the kernel | to DDP | ms a step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in found.items():
        lines.append(
            f"| {name} | {one['loss']:.4f} | {one['loss'] / base['loss']:.4f} | {one['bytes']:,.0f} | "
            f"{one['bytes'] / base['bytes']:.4f} | {one['wired']:,.0f} | {one['wired'] / base['wired']:.4f} | "
            f"{one['seconds'] * 1000:.1f} |"
        )
    note = (
        f"{arguments.steps} steps of {BATCH} windows of {BLOCK} bytes on each of two ranks; the loss is in nats a "
        "byte, on files not trained on.\nReplicas exchange weights every 20 steps, after a quarter of the steps by "
        "data parallelism where nothing else is said; bytes and times\nare those of the steps apart. Bytes are those "
        "of the sums of gradients, or of weights, as wholes; the kernel counts what both ranks\nsend over loopback. "
        "DiLoCo steps by SGD(lr=0.7, momentum=0.5, nesterov=True)."
    )
    report("local_updates", [], arguments, note="\n\n".join([note, "\n".join(lines)]))


if __name__ == "__main__":
    main()
