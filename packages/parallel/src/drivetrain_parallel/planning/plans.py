"""Plan the division of a model: the styles that are given, then those that the model brings, then what is found."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from drivetrain_messages import list_some
from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.layers.apply import named_cuts
from drivetrain_parallel.plan import Cut, ParallelPlan
from drivetrain_parallel.planning.found_experts import find_experts
from drivetrain_parallel.planning.found_styles import TIED, find_regions, joined
from drivetrain_parallel.planning.given_styles import GIVEN, plan_styles, read_library_plan, read_patterns


def plan_model(model: nn.Module, size: int, styles: Mapping[str, str] | None = None) -> ParallelPlan:
    """Plan the division of a model's layers among `size` ranks. Pure: nothing is changed or sent.

    Args:
        model: The model, on any device, meta included.
        size: The number of ranks of the tensor axis.
        styles: Styles of layers by patterns of their names, such as `{"blocks.*.mlp_in": "column"}`; "whole" leaves a
            layer on every rank. Layers that no pattern matches follow the model's own plan (transformers' `tp_plan`)
            or are found by their sizes.

    Returns:
        The plan, the same on every rank that is given an equal model. It divides nothing where the model has no two
        layers between which activations could stay divided.

    Raises:
        ParallelPlanError: Styles do not fit the model, or it has such layers, and none can be divided.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> [(layer.name, layer.style) for layer in plan_model(model, 2).layers]
        [('0', 'column'), ('2', 'row')]
    """
    given = read_patterns(model, styles or {})
    brought, left = read_library_plan(model)
    plan = plan_styles(model, given, size, source=GIVEN)
    rest = {name: style for name, style in brought.items() if name not in given}
    plan = joined(plan, plan_styles(model, rest, size, source="the model's own plan"))
    plan = replace(plan, left=left)
    if not brought:
        plan = joined(plan, find_regions(model, size, taken=frozenset(given)))
    reasons = [f"{name}: {reason}" for name, reason in plan.left.items() if reason != TIED]
    if reasons and not plan.layers:
        raise ParallelPlanError(
            f"{type(model).__name__} has no layer that {size} ranks can divide: {list_some(reasons, most=2)}. Give "
            "styles by patterns, such as {'*.fc1': 'column', '*.fc2': 'row'}; {'*': 'whole'} leaves the model on "
            "every rank"
        )
    _check_ties(model, plan)
    places = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return replace(plan, layers=tuple(sorted(plan.layers, key=lambda layer: places[layer.name])))


def plan_experts(model: nn.Module, size: int) -> ParallelPlan:
    """Plan the division of a model's experts among `size` ranks. Pure: nothing is changed or sent.

    Experts are a module of its own: all of its parameters are of shape (experts, ...), and its forward takes tokens
    (tokens, width), the experts that each token chooses (tokens, choices) and the weights of these choices (tokens,
    choices), and returns the weighted sums (tokens, width). So are those of transformers. Each kind is tried.

    Args:
        model: The model, on any device, meta included.
        size: The number of ranks that hold the experts.

    Returns:
        The plan, the same on every rank that is given an equal model. It divides nothing if the model has no experts.

    Raises:
        ParallelPlanError: The model has experts, and none can be divided.
    """
    plan = find_experts(model, size)
    if plan.left and not plan.layers:
        reasons = list_some([f"{name}: {reason}" for name, reason in plan.left.items()], most=2)
        raise ParallelPlanError(
            f"{type(model).__name__} has no experts that {size} ranks can divide: {reasons}"
        )
    _check_ties(model, plan)
    return plan


def _check_ties(model: nn.Module, plan: ParallelPlan) -> None:
    """Refuse parameters that two layers share and divide differently, or of which one layer holds the whole."""
    cuts: dict[Tensor, tuple[str, Cut]] = {}
    names: set[str] = set()
    for name, parameter, cut in named_cuts(model, plan):
        other, held = cuts.setdefault(parameter, (name, cut))
        names.add(name)
        if held != cut:
            raise ParallelPlanError(
                f"{name} and {other} are one parameter, which they would divide in two ways: give both the style "
                "'whole'"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in cuts and name not in names:
            raise ParallelPlanError(
                f"{name} and {cuts[parameter][0]} are one parameter, of which only the second is divided: give that "
                "the style 'whole', or both a style"
            )
