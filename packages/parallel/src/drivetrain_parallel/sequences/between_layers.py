"""Sequence parallelism: between divided layers, each rank of a tensor axis treats its own positions.

Modules around divided layers, such as attention and a perceptron, are given whole sequences, as without it. What
stands between them in a block, such as norms, dropout and the residual, is computed on parts, so that ranks hold the
whole of no activation of a block but these modules' inputs.
"""

from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_parallel.layers.divided_layers import Region, divide_layer
from drivetrain_parallel.plan import LayerPlan, ParallelPlan
from drivetrain_parallel.ranks import TensorRanks, join
from drivetrain_parallel.sequences.block_stack import BlockCall, BlockStack, divide_blocks
from drivetrain_parallel.sequences.blocks import find_blocks
from drivetrain_parallel.sequences.positions import SequenceCut, take_positions
from drivetrain_parallel.streams import RankStream

_SETTING = "parallel.sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenPlan:
    """The division of what stands between the divided layers of a model.

    Attributes:
        size: The number of ranks.
        blocks: The names of the blocks that compute on a part of each sequence, in order.
        compared: The blocks that are compared with what they compute undivided: one of each make.
        joins: The modules in blocks that are given whole sequences: those around divided layers; where a block itself
            is around them, the column layers.
        takes: The modules of whose output each rank goes on with its part: the same, or the row layers.
        summed: The other modules in blocks that hold parameters, whose gradients are added up over the ranks.
        is_random: Whether blocks draw random numbers when they train.
    """

    size: int
    blocks: tuple[str, ...]
    compared: frozenset[str]
    joins: tuple[str, ...]
    takes: tuple[str, ...]
    summed: tuple[str, ...]
    is_random: bool


def plan_between_layers(model: nn.Module, plan: ParallelPlan) -> BetweenPlan:
    """Plan the division of what stands between the divided layers of a model. Pure: nothing is changed or sent.

    Args:
        model: The model, not divided yet.
        plan: The plan of its layers.

    Raises:
        ParallelPlanError: The model has no stack of blocks, or its sequences are divided already.
    """
    found = find_blocks(model, plan.size, setting=_SETTING)
    columns: defaultdict[str, list[str]] = defaultdict(list)
    for layer in plan.layers:
        if layer.style == "column" and _is_in(layer.name, found.blocks):
            columns[layer.region].append(layer.name)
    joins: set[str] = set()
    takes: set[str] = set()
    for row, names in columns.items():
        holder = _holder([row, *names])
        is_own = holder in found.blocks
        joins.update(names if is_own else [holder])
        takes.add(row if is_own else holder)
    joins, takes = ({name for name in of if not _is_in(name, of - {name})} for of in (joins, takes))
    divided = {layer.name for layer in plan.layers}
    summed = tuple(
        name
        for name, module in model.named_modules()
        if _is_in(name, found.blocks) and not _is_in(name, joins | takes) and name not in divided
        if next(module.parameters(recurse=False), None) is not None
    )
    return BetweenPlan(
        size=plan.size,
        blocks=found.blocks,
        compared=found.compared,
        joins=tuple(sorted(joins)),
        takes=tuple(sorted(takes)),
        summed=summed,
        is_random=found.is_random,
    )


def divide_between_layers(
    model: nn.Module, plan: BetweenPlan, ranks: TensorRanks, *, device: torch.device | None = None
) -> None:
    """Have a model, whose layers are divided, compute on parts of sequences between them. Called on all ranks.

    Nothing is sent. Inputs, outputs and gradients of the model are what they were.

    Args:
        model: The model, after `divide_model`.
        plan: The plan, made before that.
        ranks: The ranks that divide the layers.
        device: The device that the model will run on; by default that of its first parameter.
    """
    on = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    stream = RankStream(ranks.rank, on, is_used=plan.is_random)
    division = BetweenLayers(ranks)
    stack = BlockStack(plan.blocks, plan.compared, ranks, stream, division)
    for name in plan.summed:
        layer = LayerPlan(name=name, style="summed")
        divide_layer(model.get_submodule(name), layer, ranks, Region(ranks, stream))
    for name in {*plan.joins, *plan.takes}:
        module = model.get_submodule(name)
        kind: Any = type(module)
        run = partial(
            _run_around, stack, division, stream, name in plan.joins, name in plan.takes, kind.forward
        )

        def forward(self: nn.Module, *args: Any, _run: Any = run, **kwargs: Any) -> Any:
            return _run(self, args, kwargs)

        module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    divide_blocks(model, stack)


def _run_around(
    stack: BlockStack,
    division: "BetweenLayers",
    stream: RankStream,
    joins: bool,
    takes: bool,
    whole: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a module of a block that is given whole sequences, or returns them."""
    if stack.is_whole:
        return whole(module, *args, **kwargs)
    if joins:
        call = BlockCall(args, kwargs)
        cut = stack.current_cut(call.states)
        args, kwargs = call.changed(lambda one: division.join(one, cut) if one is call.states else one)
    with stream.outside() if joins and takes else nullcontext():  # all ranks compute this alike
        output = whole(module, *args, **kwargs)
    return stack.with_states(output, division.take_own) if takes else output


class BetweenLayers:
    """Blocks in which each rank treats its own positions, but for modules that join them themselves."""

    needed = (
        "what stands between its divided layers must treat each position alone, or be a module around such layers; "
        f"or leave {_SETTING} out"
    )

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._given: Tensor | None = None
        self._joined: Tensor | None = None

    def take_own(self, states: Tensor) -> Tensor:
        """Return this rank's positions of whole sequences."""
        return self.take(
            states, SequenceCut(length=states.shape[1], size=self._ranks.size, device=states.device)
        )

    def take(self, states: Tensor, cut: SequenceCut) -> Tensor:
        """Return this rank's positions of what all ranks computed alike."""
        return take_positions(states, cut, self._ranks)

    def join(self, states: Tensor, cut: SequenceCut) -> Tensor:
        """Return the states of all positions, on which all ranks go on alike."""
        if (
            self._joined is None or self._given is not states
        ):  # query, key and value layers are given the same
            sizes = (cut.own_length,) * cut.size
            self._given, self._joined = states, join(states, 1, sizes, self._ranks).index_select(1, cut.order)
        return self._joined

    def argument(self, tensor: Tensor, cut: SequenceCut) -> Tensor:
        """Return an argument as it is: modules around divided layers are given whole sequences."""
        del cut
        return tensor

    @contextmanager
    def computing(self, cut: SequenceCut) -> Generator[None]:
        """Forget what was joined after a block."""
        del cut
        try:
            yield
        finally:
            self._given = self._joined = None


def _holder(names: list[str]) -> str:
    """Return the name of the innermost module that holds modules of these names."""
    parts = [name.split(".")[:-1] for name in names]
    depth = 0
    while all(len(one) > depth and one[depth] == parts[0][depth] for one in parts):
        depth += 1
    return ".".join(parts[0][:depth])


def _is_in(name: str, modules: Any) -> bool:
    """Return whether a module of that name is one of these modules, or inside one."""
    return any(name == one or name.startswith(f"{one}.") for one in modules)
