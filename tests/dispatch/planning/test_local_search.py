"""Plans beside the best there are: every placement of small models is tried, and timed on the same clock."""

import random
from itertools import combinations_with_replacement, product

import pytest
import torch
from torch import nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout, compute_module_sizes
from drivetrain_dispatch.planning.block_groups import BlockCost, Forward, costs_of, groups_of
from drivetrain_dispatch.planning.blocks import Block, blocks_of
from drivetrain_dispatch.planning.device_map import Tier
from drivetrain_dispatch.planning.infer_device_map import infer_auto_device_map
from drivetrain_dispatch.planning.initial_placement import Budgets, Placed
from drivetrain_dispatch.planning.local_search import Search
from drivetrain_dispatch.planning.pipeline_model import Bandwidths
from drivetrain_dispatch.planning.solver import plan_places

SOURCES: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST, Tier.DISK)


class Case:
    """A small model and a machine that it does not fit: uneven layers, ties, units, a host that may be small."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        size = {
            "even": lambda: 100,
            "uneven": lambda: draw.randint(10, 300),
            "few large": lambda: draw.choice([50, 50, 60, 400]),
        }[kind := draw.choice(["even", "uneven", "few large"])]
        self.blocks: list[Block] = []
        for index in range(draw.randint(3, 5)):
            if index and draw.random() < 0.12:
                first = self.blocks[draw.randrange(index)].group
                units = (self.blocks[first].size_bytes,)
                self.blocks.append(Block(f"{index}", 0, first, units))
                continue
            whole = size()
            part = draw.randint(10, whole - 20) if whole >= 40 and draw.random() < 0.4 else 0
            self.blocks.append(Block(f"{index}", whole, index, (part, whole - part) if part else ()))
        total, need = (
            sum(block.size_bytes for block in self.blocks),
            max(block.need_bytes for block in self.blocks),
        )
        count = draw.choice([1, 1, 2])
        devices = [
            max(int(total * draw.uniform(0.15, 0.8) / count), need // draw.choice([1, 2]))
            for _ in range(count)
        ]
        host = draw.choice([10**6, int(total * draw.uniform(0, 0.5))])
        self.budgets = Budgets(devices=tuple(devices), host=host)
        self.rates = Bandwidths(
            to_device=draw.choice([30.0, 100.0, 300.0]), from_disk=draw.choice([20.0, 60.0, 200.0])
        )
        self.costs = {
            block.name: BlockCost(seconds=1.0 if kind == "even" else draw.choice([0.0, draw.uniform(0, 4)]))
            for block in self.blocks
        }

    def best_seconds(self) -> float | None:
        """The shortest forward of all placements in which each device computes one run of layers."""
        each = costs_of(self.blocks, self.costs)
        groups = groups_of(self.blocks, each)
        search = Search(groups, Forward(self.blocks, each), self.budgets, self.rates)
        count = len(groups.sizes)
        runs = [
            [sum(index >= end for end in ends) for index in range(count)]
            for ends in combinations_with_replacement(range(count + 1), len(self.budgets.devices) - 1)
        ]
        found = [
            search.found(Placed(list(sources), devices))
            for devices in runs
            for sources in product(SOURCES, repeat=count)
        ]
        return min((one.seconds for one in found if one is not None), default=None)


def test_plans_are_near_the_best_there_is() -> None:
    slower: list[float] = []
    for seed in range(120):
        case = Case(seed)
        best = case.best_seconds()
        if best is None:
            with pytest.raises(DeviceMapError):
                plan_places(case.blocks, case.costs, case.budgets, case.rates)
            continue
        plan = plan_places(case.blocks, case.costs, case.budgets, case.rates)
        slower.append(plan.seconds / best if best else 1.0)
    assert len(slower) >= 90
    assert max(slower) <= 1.2
    assert sum(ratio <= 1.05 for ratio in slower) >= 0.95 * len(slower)


def test_a_plan_is_never_slower_than_accelerates_map() -> None:
    """Both timed on the plan's clock. Accelerate plans for accelerators that are there alone, hence a host's maps."""
    pytest.importorskip("accelerate.state")  # tests/accelerate would do for "accelerate"
    import accelerate

    for seed in range(40):
        draw = random.Random(seed)
        with torch.device("meta"):
            model = nn.Sequential(
                *(nn.Linear(draw.randint(40, 200), 100) for _ in range(draw.randint(4, 30)))
            )
        budgets: dict[int | str, int] = {"cpu": int(compute_module_sizes(model)[""] * draw.uniform(0.4, 0.8))}
        rates = Bandwidths(to_device=1e5, from_disk=draw.choice([2e4, 1e5]))
        costs = {str(index): BlockCost(seconds=draw.uniform(0, 2)) for index in range(len(model))}
        blocks = blocks_of(ModelLayout.of(model))
        each = costs_of(blocks, costs)
        room = Budgets(devices=(budgets["cpu"],), host=0, in_place=True)
        search = Search(groups_of(blocks, each), Forward(blocks, each), room, rates)

        def seconds(
            places: dict[str, object], search: Search = search, blocks: list[Block] = blocks
        ) -> float:
            sources: list[Tier] = [
                Tier.DEVICE if places.get(block.name, places.get("")) == "cpu" else Tier.DISK
                for block in blocks
            ]
            found = search.found(Placed(sources, [0] * len(sources)))
            assert found is not None, "the map exceeds its budget"
            return found.seconds

        ours = infer_auto_device_map(model, budgets, rates=rates, costs=costs)
        theirs = accelerate.infer_auto_device_map(model, dict(budgets))
        assert seconds({**ours}) <= seconds({**theirs}) * (1 + 1e-9), seed
