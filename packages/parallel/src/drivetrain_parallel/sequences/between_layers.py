"""Sequence parallelism: between divided layers, each rank of a tensor axis treats its own positions.

Modules around divided layers, such as attention and a perceptron, are given whole sequences, as without it. What
stands between them in a block, such as norms, dropout and the residual, is computed on parts, so that ranks hold the
whole of no activation of a block but these modules' inputs.
"""

from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.layers.divided_layers import Region, divide_layer, with_forward
from drivetrain_parallel.outputs.layout import PartLayout
from drivetrain_parallel.plan import LayerPlan, ParallelPlan, shared_prefix
from drivetrain_parallel.ranks import TensorRanks, join
from drivetrain_parallel.sequences.block_calls import BlockCall, with_states
from drivetrain_parallel.sequences.block_stack import BlockStack, divide_blocks
from drivetrain_parallel.sequences.block_trial import BlockTrial, without_values
from drivetrain_parallel.sequences.blocks import STACK, find_blocks
from drivetrain_parallel.sequences.positions import SequenceCut, take_positions
from drivetrain_parallel.streams import RankStream

_SETTING = "parallel.sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenPlan:
    """The division of what stands between the divided layers of a model.

    Attributes:
        size: The number of ranks.
        blocks: The names of the blocks that compute on a part of each sequence, in order.
        compared: The blocks that are tried at their first run: one of each make.
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
    if not found.blocks:
        raise ParallelPlanError(f"{type(model).__name__} has no {STACK}: leave {_SETTING} out")
    columns: defaultdict[str, list[str]] = defaultdict(list)
    for layer in plan.layers:
        if layer.style == "column" and _is_in(layer.name, found.blocks):
            columns[layer.region].append(layer.name)
    joins: set[str] = set()
    takes: set[str] = set()
    for row, names in columns.items():
        holder = shared_prefix([row, *names]).removesuffix(".")
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
    whole = {name: without_values(model.get_submodule(name)) for name in plan.compared}
    trials: dict[str, BlockTrial] = {}
    stack = BlockStack(plan.blocks, trials, ranks, stream, division)
    for name in plan.summed:
        layer = LayerPlan(name=name, style="summed")
        divide_layer(model.get_submodule(name), layer, ranks, Region(ranks, stream))
    for name in {*plan.joins, *plan.takes}:
        around = _Around(stack, division, stream, joins=name in plan.joins, takes=name in plan.takes)
        with_forward(model.get_submodule(name), around.run)
    for name, block in whole.items():
        trials[name] = BlockTrial(block, without_values(model.get_submodule(name)))
    divide_blocks(model, stack)


@dataclass(frozen=True, slots=True)
class _Around:
    """A module of a block that is given whole sequences, or returns them."""

    stack: BlockStack
    division: "BetweenLayers"
    stream: RankStream
    joins: bool
    takes: bool

    def run(self, module: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module on what it joins of a call; return this rank's part of what it returns."""
        if self.joins:
            call = BlockCall(args, kwargs)
            cut = self.stack.running_cut(call.states)
            args, kwargs = call.changed(
                lambda one: self.division.join_once(one, cut) if one is call.states else one
            )
        with self.stream.outside() if self.joins and self.takes else nullcontext():  # all compute this alike
            output = whole(module, *args, **kwargs)
        return with_states(output, self.division.take_own) if self.takes else output


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
        cut = SequenceCut(length=states.shape[1], size=self._ranks.size, device=states.device)
        return self.take(states, 1, cut)

    def take(self, tensor: Tensor, dim: int, cut: SequenceCut) -> Tensor:
        """Return this rank's positions of what all ranks computed alike."""
        return take_positions(tensor, cut, self._ranks, dim=dim)

    def layout(self, states: Tensor, rows: Tensor) -> PartLayout:
        """Return the layout of parts, which are joined for whatever is outside of blocks: all compute it alike."""
        return PartLayout.of_rows(states, rows, self._ranks, averages=False)

    def join_once(self, states: Tensor, cut: SequenceCut) -> Tensor:
        """Return the joined states, the same in a block: query, key and value layers are given one tensor."""
        if self._joined is None or self._given is not states:
            sizes = (cut.own_length,) * cut.size
            self._given = states
            self._joined = join(states, 1, sizes, self._ranks).index_select(1, cut.order)
        return self._joined

    def argument(self, tensor: Tensor, cut: SequenceCut) -> Tensor:
        """Return an argument as it is: modules around divided layers are given whole sequences."""
        del cut
        return tensor

    def gradient(self, own: Tensor) -> Tensor:
        """Return a gradient as it is: it has been added up over the ranks."""
        return own

    @contextmanager
    def computing(self, cut: SequenceCut) -> Generator[None]:
        """Forget what was joined after a block."""
        del cut
        try:
            yield
        finally:
            self._given = self._joined = None


def _is_in(name: str, modules: Any) -> bool:
    """Return whether a module of that name is one of these modules, or inside one."""
    return any(name == one or name.startswith(f"{one}.") for one in modules)
