"""What a training step on XLA costs beyond a hand-written torch-xla loop: a small transformer, on the processor.

    uv sync --project envs/xla
    envs/xla/.venv/bin/python benchmarks/xla.py

Both loops end a graph with each step, and have compiled it before the first round that counts. What is measured is
the processor time of the process with XLA's threads, to which other programs add nothing. Each number of devices is a
process of its own, since a process has one for good.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rounds import Goal, Table, parse_arguments, report, take_turns
from torch import Tensor, nn

STEPS = 5  # in one turn
WIDTH, BATCH, LENGTH, WORDS = 128, 8, 64, 256
BY_HAND, OURS, ONE_CALL = "torch-xla by hand", "drivetrain", "drivetrain, train_step"


class TinyTransformer(nn.Module):
    """Two layers of torch's own encoder, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, words)."""
        return self.head(self.layers(self.words(words)))


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and what trains it."""
    torch.manual_seed(0)
    model = TinyTransformer()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """The loss of predicting each word from itself."""
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def step_by_hand(words: Tensor, mesh: Any) -> Callable[[], None]:
    """The loop of torch-xla's documentation; under SPMD it cuts the batch."""
    import torch_xla
    import torch_xla.distributed.spmd as spmd

    model, _ = parts()
    model = model.to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        if mesh is not None:
            spmd.mark_sharding(words, mesh, ("fsdp", None))
        optimizer.zero_grad()
        loss_of(model, words).backward()
        optimizer.step()
        torch_xla.sync()

    return step


def drivetrain_step(accelerator: Any, words: Tensor) -> Callable[[], None]:
    """The documented loop of drivetrain."""
    model, optimizer = accelerator.prepare(*parts())

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, words))
            optimizer.step()
            optimizer.zero_grad()

    return step


def train_step(accelerator: Any, words: Tensor) -> Callable[[], None]:
    """The same in one call."""
    accelerator.prepare(*parts())
    return lambda: accelerator.train_step(words, loss=loss_of)


def measure(rounds: int) -> dict[str, list[float]]:
    """Time the loops in this process."""
    import torch_xla
    import torch_xla.distributed.spmd as spmd

    from drivetrain import Accelerator

    accelerators = [Accelerator(backend="xla", sections={"state": {"device": "xla"}}) for _ in range(2)]
    mesh = spmd.get_1d_mesh("fsdp") if torch_xla.runtime.is_spmd() else None
    words = torch.randint(WORDS, (BATCH, LENGTH)).to("xla")
    steps = {
        BY_HAND: step_by_hand(words, mesh),
        OURS: drivetrain_step(accelerators[0], words),
        ONE_CALL: train_step(accelerators[1], words),
    }

    def turn(step: Callable[[], None]) -> float:
        torch_xla.sync(wait=True)
        start = time.process_time()
        for _ in range(STEPS):
            step()
        torch_xla.sync(wait=True)
        return (time.process_time() - start) / STEPS

    return take_turns({name: partial(turn, step) for name, step in steps.items()}, rounds=rounds)


def main() -> None:
    """Run this script for each number of devices, and write the tables."""
    arguments = parse_arguments(__doc__ or "", rounds=21)
    if arguments.worker:
        print(json.dumps(measure(arguments.rounds)))
        return
    tables: list[Table] = []
    for count in (1, 2):
        variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count), "TF_CPP_MIN_LOG_LEVEL": "2"}
        finished = subprocess.run(
            [sys.executable, sys.argv[0], "--worker", "--rounds", str(arguments.rounds)],
            check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables},
        )  # fmt: skip
        devices = "one device" if count == 1 else f"SPMD, {count} devices, a batch cut over them"
        goals = [Goal(of=each, beside=BY_HAND, most=1.03) for each in (OURS, ONE_CALL)]
        measured = json.loads(finished.stdout.splitlines()[-1])
        tables.append(
            Table(
                title=f"Processor time of a step on {devices}",
                unit="ms",
                measured=measured,
                goals=goals,
                digits=3,
            )
        )
    report("xla", tables, arguments)


if __name__ == "__main__":
    main()
