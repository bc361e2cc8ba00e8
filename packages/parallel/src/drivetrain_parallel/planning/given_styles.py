"""The regions of a model whose styles are given: by a user's patterns, or by the model's own plan."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from drivetrain_messages import find_near
from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.layers.divided_layers import kind_of
from drivetrain_parallel.plan import STYLES, LayerPlan, ParallelPlan, Style, shared_prefix
from drivetrain_parallel.planning.found_styles import joined, make_of, placed
from drivetrain_parallel.planning.regions import (
    RegionShape,
    layer_sizes,
    output_cuts,
    proposals,
    untried_proposal,
)
from drivetrain_parallel.planning.trial import Trial

GIVEN = "given"  # the source of a user's styles

# The words of transformers' `tp_plan`, which is data of the model's class.
_OF_TRANSFORMERS: Mapping[str, Style] = MappingProxyType(
    {
        "colwise": "column",
        "rowwise": "row",
        "colwise_gather_output": "gathered_column",
        "embedding_rowwise": "vocabulary",
        "replicated_with_grad_allreduce": "summed",
    }
)


@dataclass(frozen=True, slots=True)
class GivenStyle:
    """The style that a layer is given; None if it is to stay whole.

    `pieces` is the number of equal pieces that its outputs consist of, such as 3 for a fused query, key and value;
    None if that is not said.
    """

    style: Style | None
    pieces: int | None = None


def read_patterns(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, GivenStyle]:
    """Return the style of each module that a pattern matches. The last pattern that matches wins.

    In a pattern, `*` stands for any part of a name, dots included. A style is one of `STYLES`, "whole", or "column/3"
    for outputs that consist of three pieces.

    Raises:
        ParallelPlanError: A pattern matches no module of a model that has some, or a style is unknown.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, GivenStyle] = {}
    for pattern, word in patterns.items():
        style, _, pieces = word.partition("/")
        if style not in (*STYLES, "whole") or (pieces and not (style == "column" and pieces.isdecimal())):
            raise ParallelPlanError(
                f"{pattern!r}: {word!r} is no style; {', '.join(STYLES)}, whole and column/3 (of three pieces) are"
            )
        given = GivenStyle(None if style == "whole" else style, int(pieces) if pieces else None)
        matched = [name for name in names if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name)]
        if names and not matched:  # a layer that is a model of its own has none that a pattern could name
            near = find_near(pattern, names)
            raise ParallelPlanError(
                f"{pattern!r} matches no module of {type(model).__name__}"
                + (f"; it has {near!r}" if near else "")
            )
        found |= dict.fromkeys(matched, given)
    return found


def read_library_plan(model: nn.Module) -> tuple[dict[str, GivenStyle], dict[str, str]]:
    """Return the styles that a model of transformers brings, and what of its plan is left, with the reason."""
    plan: Any = getattr(model, "tp_plan", None)
    names = [name for name, _ in model.named_modules() if name]
    styles: dict[str, GivenStyle] = {}
    left: dict[str, str] = {}
    # Some models gather the outputs of layers that are no head.
    vocabularies = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    for pattern, word in (plan if isinstance(plan, dict) else {}).items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in filter(wanted.fullmatch, names):
            style, layer = _OF_TRANSFORMERS.get(word), model.get_submodule(name)
            if style is None:
                left[name] = f"the model's style {word!r} is not one of {', '.join(_OF_TRANSFORMERS)}"
            elif not _fits(layer, style):
                left[name] = f"a {type(layer).__name__} cannot be divided"
            else:
                is_head = style == "gathered_column" and _num_outputs(layer) in vocabularies
                styles[name] = GivenStyle("vocabulary_column" if is_head else style)
    # A head may be tied to an embedding of a class that cannot be divided.
    whole = {
        p
        for name, p in model.named_parameters(remove_duplicate=False)
        if name.rpartition(".")[0] not in styles
    }
    for name in [
        name for name in styles if not whole.isdisjoint(model.get_submodule(name).parameters(recurse=False))
    ]:
        del styles[name]
        left[name] = "it shares a parameter with a layer that cannot be divided"
    return styles, left


def _fits(layer: nn.Module, style: Style) -> bool:
    """Return whether a layer's class can have a style."""
    kind = kind_of(layer)
    return style == "summed" or (kind is not None and (kind.inputs is None) == (style == "vocabulary"))


def plan_styles(
    model: nn.Module, styles: Mapping[str, GivenStyle], size: int, *, source: str
) -> ParallelPlan:
    """Return the plan of a model's layers with these styles.

    Raises:
        ParallelPlanError: A layer cannot have its style: its kind, its size or its heads do not allow it, or a trial
            of the module around a region gives other values.
    """
    plan = ParallelPlan(size=size)
    columns: list[str] = []
    summed: list[str] = []
    tried: dict[object, ParallelPlan] = {}  # by what a block consists of
    for name, _ in model.named_modules():
        if name not in styles or (style := styles[name].style) is None:
            continue
        layer = model.get_submodule(name)
        if not _fits(layer, style):
            allowed = "an Embedding" if style == "vocabulary" else "a Linear or transformers' Conv1D"
            kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
            raise ParallelPlanError(f"{name}: {style!r} is for {allowed} in floating point, not for a {kind}")
        if style == "summed":
            summed.append(name)
        elif style == "column":
            columns.append(name)
        elif style == "row":
            plan = joined(plan, _plan_region(model, styles, columns, name, size, source, tried))
            columns = []
        else:
            plan = joined(plan, _plan_outputs(name, layer, style, size))
    if columns:
        raise ParallelPlanError(
            f"{columns[0]} has style 'column', and no layer after it has 'row': its outputs would stay divided; give "
            "the layer that follows the style 'row', or this one 'gathered_column'"
        )
    known = {layer.name for layer in plan.layers}  # a trial may have found it too
    more = tuple(LayerPlan(name=name, style="summed") for name in summed if name not in known)
    plan = replace(plan, layers=(*plan.layers, *more))
    return replace(plan, sources={layer.name: source for layer in plan.layers})


def _plan_outputs(name: str, layer: nn.Module, style: Style, size: int) -> ParallelPlan:
    """Return the plan of a layer that is divided along its outputs and needs no region."""
    kind, number = kind_of(layer), _num_outputs(layer)
    assert kind is not None
    if number < size:
        raise ParallelPlanError(f"{name} has {number} outputs, fewer than the {size} ranks that divide it")
    _refuse_options(name, layer)
    one = LayerPlan(name=name, style=style, cuts=output_cuts(layer, kind, (number,), number))
    return ParallelPlan(size=size, layers=(one,))


def _num_outputs(layer: nn.Module) -> int:
    """Return the number of outputs of a layer that can be divided; of an embedding, that of its rows."""
    kind = kind_of(layer)
    assert kind is not None
    return layer.get_parameter("weight").shape[kind.outputs]


def _refuse_options(name: str, layer: nn.Module) -> None:
    """Refuse an embedding whose rows depend on each other."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if value := getattr(layer, option, None):
            raise ParallelPlanError(
                f"{name} has {option}={value!r}, which rows on several ranks do not allow"
            )


def _plan_region(
    model: nn.Module,
    styles: Mapping[str, GivenStyle],
    columns: list[str],
    row: str,
    size: int,
    source: str,
    tried: dict[object, ParallelPlan],
) -> ParallelPlan:
    """Return the plan of a region, tried if the module around it runs on one tensor."""
    if not columns:
        raise ParallelPlanError(
            f"{row} has style 'row', and no layer before it has 'column': no input is divided"
        )
    prefix = shared_prefix([*columns, row])
    module = model.get_submodule(prefix.rstrip("."))
    start = len(prefix)
    pieces = {name[start:]: number for name in columns if (number := styles[name].pieces) is not None}
    shape = RegionShape(
        module=module, columns=tuple(one[start:] for one in columns), row=row[start:], pieces=pieces
    )
    make = (shape.columns, shape.row, *pieces.items(), make_of(module))
    if make in tried:
        return placed(tried[make], prefix)
    # A model's own plan is of its makers, and to try its blocks would take seconds each.
    trial = Trial(module, layer_sizes(model.get_submodule(columns[0]))[0]) if source == GIVEN else None
    outputs = ", ".join(map(str, shape.outputs))
    sizes = f"{', '.join(columns)} of {outputs} outputs and {row} of {shape.width} inputs"
    if trial is not None and not trial.is_possible:
        _refuse_untold(shape, prefix, styles, size)
    held = _held(shape, trial, size)
    if held is None:
        anywhere = re.sub(r"\b\d+\b", "*", prefix)
        fewer = [str(number) for number in range(2, size) if _held(shape, trial, number) is not None]
        raise ParallelPlanError(
            f"{sizes} cannot be divided among {size} ranks: "
            + (
                f"no division that their sizes allow computes what {type(module).__name__} computes; its forward may "
                "take sizes from elsewhere than the outputs of its layers"
                if trial is not None and trial.is_possible
                else "each rank needs a head of its own, also of keys and values"
            )
            + (
                f"; tensor={' or '.join(fewer)} may do"
                if fewer
                else f"; give '{anywhere}*' the style 'whole'"
            )
        )
    tried[make] = held
    return placed(held, prefix)


def _held(shape: RegionShape, trial: Trial | None, size: int) -> ParallelPlan | None:
    """Return the division of a region among `size` ranks: one that holds in the trial, if that is possible."""
    if trial is None or not trial.is_possible:
        return untried_proposal(shape, size)
    return next((one for tried in proposals(shape, size) if (one := trial.settled(tried)) is not None), None)


def _refuse_untold(shape: RegionShape, prefix: str, styles: Mapping[str, GivenStyle], size: int) -> None:
    """Refuse a region that cannot be tried where more than its sizes decides what it computes.

    A model's own plan is made for its modules; a user's patterns say nothing of numbers, and only what they match.
    """
    untried = (
        f"{type(shape.module).__name__} does not run on one tensor alone, so that no division can be tried"
    )
    for one in proposals(shape, size):
        for layer in one.layers:
            number = len(layer.cuts["weight"].pieces)
            if number > 1 and layer.name not in shape.pieces:
                raise ParallelPlanError(
                    f"{prefix}{layer.name} may be of {number} pieces, and {untried}: give it the style "
                    f"'column/{number}' if its outputs are that many pieces, each with all heads, or 'column/1' "
                    "if each head has its own part"
                )
        for change in one.attributes:
            where = (prefix + change.module).rstrip(".")
            raise ParallelPlanError(
                f"{where}.{change.attribute} may have to change with the number of heads, and {untried}: take "
                "the sizes of heads from the layers' outputs, or let its forward run without its other arguments"
            )
    for name, one in shape.module.named_modules():
        where = (prefix + name).rstrip(".")
        holds = [key for key, _ in (*one.named_parameters(recurse=False), *one.named_buffers(recurse=False))]
        if where not in styles and holds:
            raise ParallelPlanError(
                f"{where or 'the model'} has values of its own ({', '.join(holds)}), and {untried}: give it "
                "the style 'summed' if each rank applies it to its own heads, else 'whole'"
            )
