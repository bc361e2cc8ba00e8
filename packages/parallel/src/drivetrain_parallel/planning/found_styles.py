"""The regions of a model that brings no styles: layers whose sizes fit, each tried before it is taken."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from drivetrain_parallel.layers.divided_layers import kind_of
from drivetrain_parallel.plan import ParallelPlan
from drivetrain_parallel.planning.regions import RegionShape, layer_sizes, proposals
from drivetrain_parallel.planning.trial import Trial

_DEPTH = 3  # the most levels of a layer below the module that is tried, as in BERT's attention
_MOST_COLUMNS = 4  # the most layers in front of a row layer

_NOT_RUN = (
    "the module around it does not run on one tensor alone, so that no division could be tried: give styles"
)
_NOT_HELD = (
    "no division that its sizes allow computes what the whole computes: its forward may take sizes from elsewhere "
    "than the outputs of its layers; chunk(3, -1) and unflatten(-1, (-1, head_size)) take them from there"
)
TIED = "another layer holds the same parameter"


def find_regions(model: nn.Module, size: int, *, taken: frozenset[str] = frozenset()) -> ParallelPlan:
    """Return a plan of the regions that are found and hold in a trial, without the layers that are `taken`.

    Layers of one role, such as the queries of all blocks, are all divided or all left.
    """
    found = ParallelPlan(size=size)
    tied = _layers_that_share(model) - taken
    claimed, reasons = {*taken, *tied}, dict.fromkeys(tied, TIED)
    known: dict[object, ParallelPlan | None] = {}
    for prefix, module, names in _modules_with_layers(model, claimed):
        key = (tuple(names), make_of(module))
        if key not in known:
            known[key] = _try_regions(module, names, size)
        inside = known[key]
        if inside is not None:
            found = joined(found, placed(inside, prefix))
            claimed |= {prefix + layer.name for layer in inside.layers}
        for name in names:  # what a trial has told stands, although the modules around cannot be tried
            if inside is not None or prefix + name not in reasons:
                reasons[prefix + name] = _NOT_RUN if inside is None else _NOT_HELD
    layers = {layer.name for layer in found.layers}
    left = {name: reason for name, reason in reasons.items() if name not in layers}
    return _with_whole_roles(replace(found, left=left, sources=dict.fromkeys(layers, "found")))


def placed(plan: ParallelPlan, prefix: str) -> ParallelPlan:
    """Return the plan of a module as the plan of a model that holds it; `prefix` ends with a dot, or is empty."""
    return replace(
        plan,
        layers=tuple(
            replace(one, name=(prefix + one.name).rstrip("."), region=prefix + one.region)
            for one in plan.layers
        ),
        attributes=tuple(
            replace(one, module=(prefix + one.module).rstrip("."), region=prefix + one.region)
            for one in plan.attributes
        ),
        random=frozenset(prefix + region for region in plan.random),
    )


def joined(one: ParallelPlan, other: ParallelPlan) -> ParallelPlan:
    """Return the plan of two plans' layers together."""
    return replace(
        one,
        layers=(*one.layers, *other.layers),
        attributes=(*one.attributes, *other.attributes),
        sources={**one.sources, **other.sources},
        left={**one.left, **other.left},
        random=one.random | other.random,
    )


def _layers_that_share(model: nn.Module) -> set[str]:
    """Return the names of the layers that hold a parameter which another module holds too."""
    holders: defaultdict[nn.Parameter, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders[parameter].add(name.rpartition(".")[0])
    names = {name for held in holders.values() if len(held) > 1 for name in held}
    return {
        name for name in names if (kind := kind_of(model.get_submodule(name))) and kind.inputs is not None
    }


def _modules_with_layers(model: nn.Module, claimed: set[str]) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield each module with two or more layers that are not claimed yet, after the modules inside it."""
    for name, module in reversed(list(model.named_modules())):
        prefix = f"{name}." if name else ""
        below = [
            inner
            for inner, layer in module.named_modules()
            if inner and inner.count(".") < _DEPTH and prefix + inner not in claimed
            if (kind := kind_of(layer)) is not None and kind.inputs is not None
        ]
        if len(below) > 1:
            yield prefix, module, below


def make_of(module: nn.Module) -> tuple[object, ...]:
    """Return what a module and those inside consist of: modules of one make compute alike, but for parameters.

    The number of a block among its like, such as `layer_idx`, is left out: each would be tried for nothing.
    """
    own = [
        (name, type(one), *((key, _seen(value)) for key, value in vars(one).items() if _is_of_make(key)))
        for name, one in module.named_modules()
    ]
    parameters = [(name, one.shape) for name, one in module.named_parameters(remove_duplicate=False)]
    buffers = [(name, one.shape, *_sample(one)) for name, one in module.named_buffers()]
    return (*own, *parameters, *buffers)


def _is_of_make(attribute: str) -> bool:
    return not attribute.startswith("_") and not re.fullmatch(
        r"(layer|block)_?(idx|index|id|number)", attribute
    )


def _seen(value: object) -> object:
    """Return a plain value, by which two modules may be compared, or which object another value is."""
    if isinstance(value, tuple | list):
        return (type(value), *map(_seen, value))
    is_plain = value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)
    return (type(value), value) if is_plain else id(value)


def _sample(buffer: Tensor) -> tuple[float, ...]:
    """Return the first values of a buffer, such as what each head is given, and the sum of all."""
    if buffer.is_meta or buffer.is_complex():
        return ()
    values = buffer.detach().flatten().double()
    return (*values[:64].tolist(), values.sum().item())


def _try_regions(module: nn.Module, names: Sequence[str], size: int) -> ParallelPlan | None:
    """Return the regions of a module that hold; None if the module does not run on one tensor."""
    found = ParallelPlan(size=size)
    trial: Trial | None = None
    start = 0
    while start < len(names) - 1:
        inputs = layer_sizes(module.get_submodule(names[start]))[0]
        end = start
        for stop in range(min(start + _MOST_COLUMNS, len(names) - 1), start, -1):
            columns = tuple(names[start:stop])
            if any(layer_sizes(module.get_submodule(name))[0] != inputs for name in columns):
                continue
            shape = RegionShape(module=module, columns=columns, row=names[stop])
            for proposal in proposals(shape, size):
                trial = trial or Trial(module, inputs)
                if not trial.is_possible:
                    return None
                if (held := trial.settled(proposal)) is not None:
                    found, end = joined(found, held), stop
                    break
            if end > start:
                break
        start = end + 1
    return found


def _with_whole_roles(plan: ParallelPlan) -> ParallelPlan:
    """Return a plan without the regions of which another block's was left.

    Blocks hand each other what heads share.
    """
    of_role: defaultdict[str, list[str]] = defaultdict(list)
    for layer in plan.layers:
        of_role[_role(layer.name)].append(layer.region)
    broken = {region for name in plan.left for region in of_role.get(_role(name), ())}
    if not broken:
        return plan
    dropped = {layer.name for layer in plan.layers if layer.region in broken}
    return replace(
        plan,
        layers=tuple(layer for layer in plan.layers if layer.name not in dropped),
        attributes=tuple(one for one in plan.attributes if one.region not in broken),
        sources={name: source for name, source in plan.sources.items() if name not in dropped},
        left={**plan.left, **dict.fromkeys(dropped, "the same layer of another block cannot be divided")},
        random=plan.random - broken,
    )


def _role(name: str) -> str:
    """Return a layer's name without the numbers of its blocks."""
    return re.sub(r"\d+", "*", name)
