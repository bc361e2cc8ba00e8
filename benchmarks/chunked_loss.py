"""The loss of a large vocabulary: peak memory and time of chunks, of all logits in fp32, and of torch's own chunks.

    uv run python benchmarks/chunked_loss.py [--tokens 2048] [--words 128000]

Each contestant runs in a process of its own: forward and backward of one loss over the words, with the hidden
states and the weight in bf16. The peak is that above the inputs, with their gradients.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rounds import RESULTS, Table, report, take_turns
from torch import Tensor

from drivetrain_memory import record_peak
from drivetrain_precision import chunked_cross_entropy, cross_entropy

HIDDEN_SIZE = 512
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_in_fp32(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What models do: all logits, and their copy in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def all_in_bf16(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """All logits, and the loss in bf16."""
    return F.cross_entropy(F.linear(hidden, weight), labels)


def existing(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """All logits in bf16, the loss in fp32 by chunks."""
    return cross_entropy(F.linear(hidden, weight), labels)


def torchs_own(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss by chunks that torch 2.15 has."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


CONTESTANTS: dict[str, Loss] = {
    "torch, logits.float()": all_in_fp32,
    "torch, loss in bf16": all_in_bf16,
    "drivetrain, cross_entropy": existing,
    "drivetrain, chunked_cross_entropy": chunked_cross_entropy,
}
if hasattr(F, "linear_cross_entropy"):
    CONTESTANTS["torch, linear_cross_entropy"] = torchs_own


def inputs(num_tokens: int, num_words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels."""
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE).bfloat16().requires_grad_()
    weight = torch.randn(num_words, HIDDEN_SIZE).mul_(HIDDEN_SIZE**-0.5).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(num_words, (num_tokens,))


def work(name: str, num_tokens: int, num_words: int) -> None:
    """Print the peak of one loss in bytes, its seconds, and the loss."""
    hidden, weight, labels = inputs(num_tokens, num_words)
    CONTESTANTS[name](hidden[:8], weight[:64], labels[:8] % 64).backward()  # libraries load at the first call
    hidden.grad = weight.grad = None
    with record_peak(children=False) as peak:
        begin = time.perf_counter()
        loss = CONTESTANTS[name](hidden, weight, labels)
        loss.backward()
        seconds = time.perf_counter() - begin
    print(peak.host_bytes - peak.host_before_bytes, seconds, loss.item())


def exact(num_tokens: int, num_words: int) -> float:
    """The loss in fp64 of the logits in bf16."""
    hidden, weight, labels = inputs(num_tokens, num_words)
    with torch.no_grad():
        pairs = zip(hidden.split(128), labels.split(128), strict=True)
        sums = [F.cross_entropy(F.linear(h, weight).double(), y, reduction="sum").item() for h, y in pairs]
    return sum(sums) / num_tokens


def main() -> None:
    """Measure every contestant, in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--only", default="", help="contestants whose name begins so")
    parser.add_argument("--tokens", type=int, default=2048, help="positions of the loss")
    parser.add_argument("--words", type=int, default=128_000, help="words of the vocabulary")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(sys.stdin.read(), arguments.tokens, arguments.words)
        return
    chosen = [name for name in CONTESTANTS if name.startswith(arguments.only)]
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    losses: dict[str, float] = {}

    def turn(name: str) -> float:
        sizes = ["--tokens", str(arguments.tokens), "--words", str(arguments.words)]
        command = [sys.executable, __file__, "--worker", *sizes]
        run = subprocess.run(command, input=name, capture_output=True, text=True, check=True)
        peak, took, loss = map(float, run.stdout.split())
        seconds[name].append(took)
        losses[name] = loss
        return peak

    peaks = take_turns(
        {name: lambda name=name: turn(name) for name in chosen}, rounds=arguments.rounds, warmup=0
    )
    true = exact(arguments.tokens, arguments.words)
    found = "; ".join(f"{name}: {abs(loss - true):.1e}" for name, loss in losses.items())
    tables = [
        Table(title="Peak memory of forward and backward", unit="MB", measured=peaks),
        Table(title="Forward and backward", unit="s", measured=seconds),
    ]
    logits = arguments.tokens * arguments.words
    gradients = (arguments.tokens + arguments.words) * HIDDEN_SIZE
    note = (
        f"{arguments.tokens:,} tokens, {arguments.words:,} words, hidden size {HIDDEN_SIZE}, bf16: the logits take "
        f"{logits * 2e-6:,.0f} MB, their copy in fp32 {logits * 4e-6:,.0f} MB. Peaks are above the inputs; the "
        f"gradients of both inputs, which all contestants return, take {gradients * 2e-6:,.0f} MB. The distance of "
        "the loss is from that in fp64 of the same logits: torch's own chunks return it rounded to bf16."
    )
    report(
        "chunked_loss", tables, arguments, note=f"{note}\n\nDistance of the loss from {true:.6f}: {found}."
    )


if __name__ == "__main__":
    main()
