"""What it takes to plan where a model goes: mixtures of experts with up to 50,000 modules, on the meta device.

uv run --group bench python benchmarks/device_map.py
"""

import time
from collections.abc import Callable

import torch
from rounds import Table, installed, parse_arguments, report, take_turns
from torch import nn

from drivetrain_dispatch.infer import infer_auto_device_map
from drivetrain_dispatch.sizes import compute_module_sizes
from drivetrain_dispatch.timeline import Rates

RATES = Rates(to_device=25e9, from_disk=3e9)
NUM_EXPERTS = 128


class Expert(nn.Module):
    """Three matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2048, 768, bias=False)
        self.up = nn.Linear(2048, 768, bias=False)
        self.down = nn.Linear(768, 2048, bias=False)


class Layer(nn.Module):
    """Attention, a router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(2048, 2048, bias=False) for name in "qkvo"})
        self.router = nn.Linear(2048, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.norms = nn.ModuleList(nn.LayerNorm(2048) for _ in range(2))


def build(num_layers: int) -> nn.Module:
    """A model of 522 modules a layer, without memory."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Embedding(150_000, 2048), *(Layer() for _ in range(num_layers)), nn.Linear(2048, 150_000)
        )


def contestants(model: nn.Module, whole: tuple[str, ...]) -> dict[str, Callable[[], float]]:
    """Each plans the same model for the same budget: half of it fits in the host's memory, the rest goes to the disk.

    Accelerate plans for accelerators that are there alone, and a table is to be the same on every machine.
    """
    budgets = {"cpu": compute_module_sizes(model)[""] // 2}

    def ours() -> float:
        start = time.perf_counter()
        infer_auto_device_map(model, budgets, rates=RATES, no_split_module_classes=whole)
        return time.perf_counter() - start

    found: dict[str, Callable[[], float]] = {"drivetrain": ours}
    if installed("accelerate"):
        from accelerate import infer_auto_device_map as infer

        def theirs() -> float:
            start = time.perf_counter()
            infer(model, dict(budgets), no_split_module_classes=list(whole))
            return time.perf_counter() - start

        found["Accelerate"] = theirs
    return found


def main() -> None:
    """Time every size."""
    arguments = parse_arguments(__doc__, rounds=5)
    tables: list[Table] = []
    for num_layers in (4, 16, 96):
        model = build(num_layers)
        num_modules = sum(1 for _ in model.modules())
        for whole, said in (((), "every part may go elsewhere"), (("Layer",), "layers stay whole")):
            measured = take_turns(contestants(model, whole), rounds=arguments.rounds)
            title = f"{num_layers} layers of {NUM_EXPERTS} experts, {num_modules:,} modules; {said}"
            tables.append(Table(title=title, unit="ms", measured=measured))
    report("device_map", tables, arguments)


if __name__ == "__main__":
    main()
