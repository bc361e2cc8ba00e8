"""Apply a plan to a model: cut the parameters, then have the layers compute with the other ranks."""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.layers.divided_layers import (
    Region,
    divide_layer,
    holds_experts,
    is_divided,
    kind_of,
    watch,
)
from drivetrain_parallel.plan import Cut, ParallelPlan, shared_prefix
from drivetrain_parallel.ranks import OneRank, TensorRanks
from drivetrain_parallel.streams import RankStream


def divide_model(
    model: nn.Module,
    plan: ParallelPlan,
    ranks: TensorRanks,
    *,
    device: torch.device | None = None,
    alike: TensorRanks | None = None,
    before: Callable[[ParallelPlan], None] | None = None,
) -> None:
    """Divide a model by a plan, in place. Called on all ranks that divide it, on equal models.

    Parameters stay the same objects and hold this rank's part, so optimizers and ties need no change. Nothing is
    sent: forward and backward of the divided model are then called on all of these ranks together, on the same input;
    of a model whose experts are divided, each on its own input. A module of whose operations each rank has a part
    gets the attribute `divided_among`, the number of these ranks.

    Args:
        model: The model, with the same values on all ranks.
        plan: The plan, made for this model and number of ranks.
        ranks: The ranks that divide it.
        device: The device that the model will run on, whose random numbers it draws; by default that of its first
            parameter.
        alike: Of a plan of experts, those of `ranks` that are given the same input, such as the ranks of a tensor
            axis; each computes a part of it. None if every rank is given its own.
        before: A function that is called with the plan of each region before that is divided, such as one that gives
            its parameters values: no rank then holds the whole of two regions.

    Raises:
        ParallelPlanError: The plan is for another number of ranks, the model is divided already, or some of `alike`
            would hold the same experts. Nothing has changed.
    """
    if plan.size != ranks.size:
        raise ParallelPlanError(
            f"a plan for {plan.size} ranks with {ranks.size} ranks: plan for {ranks.size}"
        )
    if alike is not None and ranks.size % alike.size:
        raise ParallelPlanError(
            f"{ranks.size} ranks with experts, of which {alike.size} are given the same input: hold them on a "
            f"multiple of {alike.size}"
        )
    modules = dict(model.named_modules())
    for layer in plan.layers:
        if layer.name not in modules:
            raise ParallelPlanError(
                f"the plan names {layer.name!r}, which {type(model).__name__} does not have"
            )
        if is_divided(modules[layer.name]):
            raise ParallelPlanError(f"{layer.name} of {type(model).__name__} is divided already")
    on = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    parameters = [parameter for _, parameter, _ in named_cuts(model, plan)]
    are_tied = len(set(parameters)) < len(parameters)
    regions: list[Region] = []
    for part in (plan,) if are_tied else plan.regions():
        if before is not None:
            before(part)
        regions.extend(_divide_regions(model, part, ranks, alike or OneRank(), on))
    watch(model, regions)


def _divide_regions(
    model: nn.Module, plan: ParallelPlan, ranks: TensorRanks, alike: TensorRanks, device: torch.device
) -> Collection[Region]:
    """Cut the parameters of some regions, and have their layers compute with the other ranks."""
    for parameter, cut in {parameter: cut for _, parameter, cut in named_cuts(model, plan)}.items():
        parameter.data = part_of(parameter.data, cut, ranks.rank, ranks.size)
        parameter.grad = None
    regions: dict[str, Region] = {}
    for layer in plan.layers:
        module = model.get_submodule(layer.name)
        if layer.region not in regions:
            inside = ranks if layer.style != "experts" else alike
            stream = RankStream(inside.rank, device, is_used=layer.region in plan.random)
            regions[layer.region] = Region(inside, stream)
        kind = kind_of(module)
        divide_layer(module, layer, ranks, regions[layer.region])
        if kind is not None and layer.cuts:
            outputs, inputs = kind.sizes
            setattr(module, outputs, module.get_parameter("weight").shape[kind.outputs])
            if kind.inputs is not None:
                setattr(module, inputs, module.get_parameter("weight").shape[kind.inputs])
    for region, inside in regions.items():
        names = [one.name for one in plan.layers if one.region == region and one.style != "summed"]
        for name in [shared_prefix(names).removesuffix(".")] if region and len(names) > 1 else names:
            vars(model.get_submodule(name))["divided_among"] = inside.ranks.size
    for change in plan.attributes:
        setattr(model.get_submodule(change.module), change.attribute, change.of_rank(ranks.rank, ranks.size))
    return regions.values()


def has_divided_layers(model: nn.Module) -> bool:
    """Return whether a model holds a divided layer."""
    return any(map(is_divided, model.modules()))


def expert_counts(model: nn.Module) -> dict[str, Tensor]:
    """Return how often the tokens that this rank sent chose each expert in the last forward, by experts' modules.

    Each tensor, of shape (experts,) and int64, is on the model's device, so that reading it may make the host wait.
    Added up over the ranks, the largest number over the mean is the load of the busiest expert.
    """
    held = (
        (name, vars(one).get("expert_counts")) for name, one in model.named_modules() if holds_experts(one)
    )
    return {name: counts for name, counts in held if counts is not None}


def named_cuts(model: nn.Module, plan: ParallelPlan) -> Iterator[tuple[str, nn.Parameter, Cut]]:
    """Yield the name, the parameter and the division of each divided parameter; a tied one has several names."""
    for layer in plan.layers:
        module = model.get_submodule(layer.name)
        for attribute, cut in layer.cuts.items():
            yield f"{layer.name}.{attribute}".lstrip("."), getattr(module, attribute), cut


def part_of(tensor: Tensor, cut: Cut, rank: int, size: int) -> Tensor:
    """Return a copy of what `rank` holds of a whole tensor."""
    held = [tensor.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges(rank, size)]
    return torch.cat(held, cut.dim)
