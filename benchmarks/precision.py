"""Precision: what is saved, and what it costs.

    uv run --group bench python benchmarks/precision.py --only "optimizer states"

A section is a function from the arguments to tables; SECTIONS lists them.
"""

import argparse
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rounds import RESULTS, Table, report
from torch import nn
from torch.optim import AdamW, Optimizer

from drivetrain import Accelerator
from drivetrain_precision import optimizer_states

NOTE = (
    "Optimizer states: what one process keeps for a transformer's block of 12.6 million weights after a step through "
    "drivetrain's `prepare`. Biases and norms stay in floating point in all of them."
)
WIDTH = 1024


class Block(nn.Module):
    """The matrices of a transformer's block, with its norms; (items, width) to (items, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the matrices make of the items."""
        y = self.norms[0](x)
        for linear in self.attention:
            y = linear(y)
        x = x + y
        return x + self.narrow(torch.relu(self.wide(self.norms[1](x))))


def makers() -> dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]]:
    """The optimizers of the installed libraries, torch's AdamW first."""
    found: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {"torch AdamW": AdamW}
    if find_spec("torchao") is not None:
        import torchao.optim as torchao

        found |= {
            f"torchao {name}": getattr(torchao, name) for name in ("AdamW8bit", "AdamWFp8", "AdamW4bit")
        }
    if find_spec("bitsandbytes") is not None:
        import bitsandbytes.optim as bitsandbytes

        found["bitsandbytes AdamW8bit"] = bitsandbytes.AdamW8bit
    return {f"drivetrain, {name}": make for name, make in found.items()}


def state_bytes(make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> float:
    """The bytes of an optimizer's states after its first step."""
    sections: dict[str, Any] = {"run": {"show_plan": False}}
    # Uncompiled: what torchao's step compiles to changes no size.
    with torch.compiler.set_stance("force_eager"), Accelerator(cpu=True, sections=sections) as accelerator:
        model = Block()
        model, optimizer = accelerator.prepare(model, make(model.parameters()))
        accelerator.backward(model(torch.ones(1, WIDTH)).square().mean())
        optimizer.step()
        return float(optimizer_states(optimizer.optimizer).size_bytes)


def states(arguments: argparse.Namespace) -> list[Table]:
    """Compare the memory of states; sizes are exact, so that one round tells all."""
    del arguments
    measured = {name: [state_bytes(make)] for name, make in makers().items()}
    return [Table(title="Optimizer states", unit="MB", measured=measured)]


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Table]]] = {"optimizer states": states}


def main() -> None:
    """Measure the chosen sections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="rounds that count")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--only", default="", help="sections whose name begins so")
    arguments = parser.parse_args()
    tables = [
        table
        for name, section in SECTIONS.items()
        if name.startswith(arguments.only)
        for table in section(arguments)
    ]
    libraries = ", ".join(
        f"{name} {version(name)}" for name in ("torchao", "bitsandbytes") if find_spec(name)
    )
    report("precision", tables, arguments, note=f"{NOTE} {libraries}.")


if __name__ == "__main__":
    main()
