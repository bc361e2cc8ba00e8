"""The loss of a large vocabulary: peak memory and time of chunks, of all logits in fp32, and of torch's own chunks.

    uv run python benchmarks/chunked_loss.py

Each contestant runs in a process of its own: forward and backward of one loss over 128,000 words, with the hidden
states and the weight in bf16. The peak is that above the inputs, with their gradients.
"""

import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rounds import Table, parse_arguments, report, take_turns
from torch import Tensor

from drivetrain_memory import record_peak
from drivetrain_precision import chunked_cross_entropy, cross_entropy

NUM_WORDS, NUM_TOKENS, HIDDEN_SIZE = 128_000, 2048, 512
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
NOTE = (
    f"{NUM_TOKENS:,} tokens, {NUM_WORDS:,} words, hidden size {HIDDEN_SIZE}, bf16: the logits take 524 MB, their "
    "copy in fp32 1,049 MB. Peaks are above the inputs; the gradients of both inputs, which all contestants return, "
    "take 133 MB. The distance of the loss is from that in fp64 of the same logits: torch's own chunks return it "
    "rounded to bf16."
)


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


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels."""
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE).bfloat16().requires_grad_()
    weight = torch.randn(NUM_WORDS, HIDDEN_SIZE).mul_(HIDDEN_SIZE**-0.5).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(NUM_WORDS, (NUM_TOKENS,))


def work(name: str) -> None:
    """Print the peak of one loss in bytes, its seconds, and the loss."""
    hidden, weight, labels = inputs()
    CONTESTANTS[name](hidden[:8], weight[:64], labels[:8] % 64).backward()  # libraries load at the first call
    hidden.grad = weight.grad = None
    with record_peak(children=False) as peak:
        begin = time.perf_counter()
        loss = CONTESTANTS[name](hidden, weight, labels)
        loss.backward()
        seconds = time.perf_counter() - begin
    print(peak.host_bytes - peak.host_before_bytes, seconds, loss.item())


def exact() -> float:
    """The loss in fp64 of the logits in bf16."""
    hidden, weight, labels = inputs()
    with torch.no_grad():
        pairs = zip(hidden.split(128), labels.split(128), strict=True)
        sums = [F.cross_entropy(F.linear(h, weight).double(), y, reduction="sum").item() for h, y in pairs]
    return sum(sums) / NUM_TOKENS


def main() -> None:
    """Measure every contestant, in turns."""
    arguments = parse_arguments(__doc__ or "", rounds=3, only="contestants whose name begins so")
    if arguments.worker:
        work(sys.stdin.read())
        return
    chosen = [name for name in CONTESTANTS if name.startswith(arguments.only)]
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    losses: dict[str, float] = {}

    def turn(name: str) -> float:
        command = [sys.executable, __file__, "--worker"]
        run = subprocess.run(command, input=name, capture_output=True, text=True, check=True)
        peak, took, loss = map(float, run.stdout.split())
        seconds[name].append(took)
        losses[name] = loss
        return peak

    peaks = take_turns(
        {name: lambda name=name: turn(name) for name in chosen}, rounds=arguments.rounds, warmup=0
    )
    true = exact()
    found = "; ".join(f"{name}: {abs(loss - true):.1e}" for name, loss in losses.items())
    tables = [
        Table(title="Peak memory of forward and backward", unit="MB", measured=peaks),
        Table(title="Forward and backward", unit="s", measured=seconds),
    ]
    report(
        "chunked_loss", tables, arguments, note=f"{NOTE}\n\nDistance of the loss from {true:.6f}: {found}."
    )


if __name__ == "__main__":
    main()
