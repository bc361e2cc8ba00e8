"""What the search for gradients that are not finite adds to a step: ours, a check by hand, torch's anomaly mode.

    uv run --group bench python benchmarks/nonfinite.py

The model is a GPT-2 of 4 blocks of width 256; a step is a forward and backward of four samples of 64 tokens, and SGD.
By hand is the loop that checks the norm of its gradients: `clip_grad_norm_(..., inf, error_if_nonfinite=True)`. It
names no layer; anomaly mode names the operation whose backward made the value.
"""

from collections.abc import Callable
from contextlib import nullcontext
from math import inf
from typing import Any

import torch
from rounds import Goal, Table, parse_arguments, repeated, report, take_turns
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from transformers import GPT2Config, GPT2LMHeadModel

from drivetrain import Accelerator

STEPS = 5
PLAIN = "drivetrain, on_nonfinite=warn"
SKIP, RAISE = "drivetrain, on_nonfinite=skip", "drivetrain, on_nonfinite=raise"
BY_HAND, ANOMALY = "torch, error_if_nonfinite", "torch, set_detect_anomaly"


def parts() -> tuple[Any, Any, torch.Tensor]:
    """The model, its optimizer and a batch."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=256, n_layer=4, n_head=8, vocab_size=2000)
    model = GPT2LMHeadModel(config)
    return model, SGD(model.parameters(), lr=1e-3), torch.arange(256).view(4, 64)


def ours(treatment: str) -> Callable[[], None]:
    """Return a step of the documented loop."""
    run = {"show_plan": False, "on_nonfinite": treatment}
    accelerator = Accelerator(cpu=True, backend="single", sections={"run": run})
    model, optimizer, ids = parts()
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchs(*, detects: bool) -> Callable[[], None]:
    """Return a step of torch alone, in anomaly mode or with a check of the norm."""
    model, optimizer, ids = parts()

    def step() -> None:
        with torch.autograd.set_detect_anomaly(True) if detects else nullcontext():
            model(input_ids=ids, labels=ids).loss.backward()
        if not detects:
            clip_grad_norm_(model.parameters(), inf, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure every contestant, in turns."""
    arguments = parse_arguments(__doc__ or "", rounds=9)
    steps = {
        PLAIN: ours("warn"),
        SKIP: ours("skip"),
        RAISE: ours("raise"),
        BY_HAND: torchs(detects=False),
        ANOMALY: torchs(detects=True),
    }
    seconds = take_turns(
        {name: repeated(step, times=STEPS) for name, step in steps.items()}, rounds=arguments.rounds
    )
    goal = Goal(of=RAISE, beside=BY_HAND, most=1.05)
    report("nonfinite", [Table(title="Time of a step", unit="ms", measured=seconds, goals=[goal])], arguments)


if __name__ == "__main__":
    main()
