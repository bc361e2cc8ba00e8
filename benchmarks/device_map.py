"""What it takes to plan where a model goes, up to 50,000 modules, and how good the plans of small models are.

Every placement of a small model is tried, and timed on the plan's clock; so is Accelerate's map for a host.

uv run --group bench python benchmarks/device_map.py
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import inf

import torch
from rounds import Table, installed, parse_arguments, report, take_turns
from torch import nn

from drivetrain_dispatch.model.model_layout import ModelLayout, compute_module_sizes
from drivetrain_dispatch.planning.block_groups import BlockCost, Forward, costs_of, groups_of
from drivetrain_dispatch.planning.blocks import blocks_of
from drivetrain_dispatch.planning.device_map import Tier
from drivetrain_dispatch.planning.infer_device_map import infer_auto_device_map, split_budgets
from drivetrain_dispatch.planning.initial_placement import Placed
from drivetrain_dispatch.planning.local_search import Search
from drivetrain_dispatch.planning.pipeline_model import Bandwidths

RATES = Bandwidths(to_device=25e9, from_disk=3e9)
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


class Small:
    """A model of a few layers of different sizes, and budgets that it does not fit into."""

    def __init__(self, seed: int, *, on_host: bool) -> None:
        draw = random.Random(seed)
        widths = [draw.randint(40, 200) for _ in range(draw.randint(4, 7))]
        with torch.device("meta"):
            self.model = nn.Sequential(*(nn.Linear(width, 100, bias=False) for width in widths))
        total = compute_module_sizes(self.model)[""]
        self.budgets: dict[int | str, int] = {"cpu": int(total * draw.uniform(0.4, 0.8))}
        if not on_host:
            self.budgets = {0: self.budgets["cpu"], "cpu": int(total * draw.uniform(0.1, 0.6))}
        self.rates = Bandwidths(to_device=draw.choice([3e4, 1e5, 3e5]), from_disk=draw.choice([2e4, 1e5]))
        self.costs = {str(index): BlockCost(seconds=draw.uniform(0, 2)) for index in range(len(widths))}
        self.blocks = blocks_of(ModelLayout.of(self.model))
        each = costs_of(self.blocks, self.costs)
        computing, room = split_budgets(self.budgets)
        self._search = Search(groups_of(self.blocks, each), Forward(self.blocks, each), room, self.rates)
        self._kinds: dict[object, Tier] = {"cpu": Tier.HOST, "disk": Tier.DISK, computing[0]: Tier.DEVICE}

    def seconds(self, sources: Sequence[Tier]) -> float:
        """What a placement takes on the plan's clock; without end if it does not keep within the budgets."""
        found = self._search.found(Placed(list(sources), [0] * len(sources)))
        return inf if found is None else found.seconds

    def of_map(self, device_map: Mapping[str, object]) -> float:
        """What a map of single layers takes."""
        return self.seconds(
            [self._kinds[device_map.get(block.name, device_map.get(""))] for block in self.blocks]
        )


def qualities(count: int, *, on_host: bool) -> Table:
    """The predicted forwards of small models: under the best of all placements, and under planned ones.

    Accelerate plans for accelerators that are there alone, so that its maps are those of a host.
    """
    measured: dict[str, list[float]] = {"best placement": [], "drivetrain": []}
    sources: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST, Tier.DISK)
    for seed in range(count):
        case = Small(seed, on_host=on_host)
        measured["best placement"].append(min(map(case.seconds, product(sources, repeat=len(case.blocks)))))
        ours = infer_auto_device_map(case.model, case.budgets, rates=case.rates, costs=case.costs)
        measured["drivetrain"].append(case.of_map(ours))
        if on_host and installed("accelerate"):
            from accelerate import infer_auto_device_map as infer

            theirs = case.of_map(infer(case.model, dict(case.budgets)))
            measured.setdefault("Accelerate", []).append(theirs)
            if theirs < measured["drivetrain"][-1]:
                raise RuntimeError(f"model {seed}: Accelerate's map is faster: {theirs} s")
    where = "a host and its disk" if on_host else "an accelerator, a host and its disk"
    return Table(
        title=f"{count} small models on {where}: a forward, as predicted", unit="s", measured=measured
    )


def main() -> None:
    """Time every size."""
    arguments = parse_arguments(__doc__, rounds=5)
    tables = [qualities(40, on_host=on_host) for on_host in (False, True)]
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
