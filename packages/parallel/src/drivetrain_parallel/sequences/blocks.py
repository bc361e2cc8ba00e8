"""Sequences divided among ranks (context parallelism): the blocks of a model, with divided attention.

The model around the blocks sees whole sequences: tokens, positions and masks before, hidden states, loss and labels
after. Inside, attention is divided, and all else treats each position alone, as a perceptron does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.outputs.layout import PartLayout
from drivetrain_parallel.planning.found_styles import make_of
from drivetrain_parallel.planning.regions import drops
from drivetrain_parallel.ranks import TensorRanks
from drivetrain_parallel.sequences.attention import METHODS, DividedAttention
from drivetrain_parallel.sequences.block_calls import sequence_dim
from drivetrain_parallel.sequences.block_stack import BlockStack, divide_blocks, has_divided_sequences
from drivetrain_parallel.sequences.block_trial import BlockTrial, without_values
from drivetrain_parallel.sequences.positions import SequenceCut, take_positions
from drivetrain_parallel.streams import RankStream

STACK = "nn.ModuleList or nn.Sequential of blocks of one class, between which sequences could stay divided"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """The division of a model's sequences among the ranks of a context axis.

    Attributes:
        size: The number of ranks.
        blocks: The names of the blocks that compute on a part of each sequence, in order.
        compared: The blocks that are tried at their first run, one of each make: what they compute on parts is
            compared with what they compute on whole sequences.
        method: The way in which attention is divided; None for the one that the number of heads allows.
        is_random: Whether blocks draw random numbers when they train.
    """

    size: int
    blocks: tuple[str, ...]
    compared: frozenset[str]
    method: str | None = None
    is_random: bool = False


def plan_sequences(model: nn.Module, size: int, method: str | None = None) -> SequencePlan:
    """Plan the division of a model's sequences among `size` ranks. Pure: nothing is changed or sent.

    The blocks are the modules of one class in the `nn.ModuleList` or `nn.Sequential` that holds the most parameters.
    A model without such blocks stays whole: the plan names none.

    Args:
        model: The model, on any device, meta included.
        size: The number of ranks of the context axis.
        method: The way in which attention is divided: "heads" or "gathered"; see `sequences.attention`.

    Raises:
        ParallelPlanError: The model attends to two sequences, lists a block twice, or is divided already; or the
            method is unknown.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(9, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))))
        >>> plan_sequences(model, 2).blocks
        ('1.0', '1.1')
    """
    if method not in (None, *METHODS):
        raise ParallelPlanError(f"method {method!r} is none of {', '.join(METHODS)}")
    found = find_blocks(model, size, setting="parallel.context")
    return replace(found, method=method)


def find_blocks(model: nn.Module, size: int, *, setting: str) -> SequencePlan:
    """Return the plan of the blocks of a model, if it has any; `setting` is what errors say to leave out."""
    if has_divided_sequences(model):
        raise ParallelPlanError(
            f"the sequences of {type(model).__name__} are divided already: build it anew, whole"
        )
    stacks = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({type(block) for block in module}) == 1
    }
    if not any(stacks.values()):
        return SequencePlan(size=size, blocks=(), compared=frozenset())
    # One block may be a model in a container: a stack of several inside is preferred.
    chosen = max(stacks, key=lambda name: (len(model.get_submodule(name)) > 1, stacks[name]))  # type: ignore[arg-type]
    listed: Any = model.get_submodule(chosen)
    blocks = dict(listed.named_children())
    if len(blocks) < len(listed):
        place = f"of {chosen} " if chosen else ""
        raise ParallelPlanError(
            f"{type(model).__name__} lists a block {place}twice, and a block takes its part of a sequence "
            f"at one place: leave {setting} out"
        )
    _refuse_two_sequences(model, chosen, stacks, setting)
    makes: dict[object, str] = {}
    for name, block in blocks.items():
        makes.setdefault(make_of(block), name)
    prefix = f"{chosen}." if chosen else ""
    return SequencePlan(
        size=size,
        blocks=tuple(prefix + name for name in blocks),
        compared=frozenset(prefix + name for name in makes.values()),
        is_random=any(map(drops, blocks.values())),
    )


def _refuse_two_sequences(model: nn.Module, chosen: str, stacks: Mapping[str, int], setting: str) -> None:
    """Refuse blocks that also attend to what another stack computes, as the decoder of a translator does."""
    block = next(model.get_submodule(chosen).children())
    takes = [name for name in signature(block.forward).parameters if name.startswith("encoder")]
    others = [
        name for name, size in stacks.items() if not name.startswith(chosen) and 5 * size > stacks[chosen]
    ]
    if takes and others:
        raise ParallelPlanError(
            f"{type(model).__name__} has blocks in {chosen} that attend to what {others[0]} computes "
            f"({takes[0]}), and only one sequence can be divided: leave {setting} out"
        )


def divide_sequences(
    model: nn.Module, plan: SequencePlan, ranks: TensorRanks, *, device: torch.device | None = None
) -> None:
    """Have a model's blocks compute on this rank's part of each sequence. Called on all ranks of the context axis.

    Nothing is sent. Forward and backward of the model are then called on all of these ranks together, on the same
    whole input, and return the same whole output. The gradient of a loss that all of them compute is the *mean* over
    these ranks of what is in `.grad`, as under data parallelism.

    Args:
        model: The model, with the same values on all ranks.
        plan: The plan, made for this model and number of ranks.
        ranks: The ranks that divide its sequences.
        device: The device that the model will run on; by default that of its first parameter.

    Raises:
        ParallelPlanError: The plan is for another number of ranks.
    """
    if plan.size != ranks.size:
        raise ParallelPlanError(
            f"a plan for {plan.size} ranks with {ranks.size} ranks: plan for {ranks.size}"
        )
    on = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    stream = RankStream(ranks.rank, on, is_used=plan.is_random)
    division = ContextDivision(ranks, plan.method)
    copies = {name: without_values(model.get_submodule(name)) for name in plan.compared}
    trials = {name: BlockTrial(copied, copied) for name, copied in copies.items()}
    divide_blocks(model, BlockStack(plan.blocks, trials, ranks, stream, division))
    for block in map(model.get_submodule, plan.blocks):
        for module in block.modules():  # in which layers may be divided too
            if module is block or hasattr(module, "divided_among"):
                vars(module)["divided_among"] = plan.size * getattr(module, "divided_among", 1)


class ContextDivision:
    """Blocks in which each rank treats its own positions, and attention is divided."""

    needed = (
        "attention must go through torch's scaled_dot_product_attention (in transformers: "
        "attn_implementation='sdpa') and be checkpointed in whole blocks alone, and all else must treat each "
        "position alone (fp8: by row) and be given positions from outside of blocks; or leave parallel.context out"
    )

    def __init__(self, ranks: TensorRanks, method: str | None) -> None:
        self._ranks, self._method = ranks, method

    def take(self, tensor: Tensor, dim: int, cut: SequenceCut) -> Tensor:
        """Return this rank's positions; the gradient of the whole is that of all ranks' parts."""
        return take_positions(tensor, cut, self._ranks, dim=dim, share=1 / self._ranks.size)

    def layout(self, states: Tensor, rows: Tensor) -> PartLayout:
        """Return the layout of parts, on which whatever treats each position alone goes on.

        The gradient of a part is `size` times its share. So is the gradient of a block's parameters, and of those
        after the blocks that are given parts; and the mean over the ranks, which hold different parts, is right.
        """
        return PartLayout.of_rows(states, rows, self._ranks)

    def argument(self, tensor: Tensor, cut: SequenceCut) -> Tensor:
        """Return this rank's part of what belongs to positions; masks stay whole."""
        dim = sequence_dim(tensor, cut.length)
        return tensor if dim is None else self.take(tensor, dim, cut)

    def gradient(self, own: Tensor) -> Tensor:
        """Return the mean over the ranks, which hold different positions."""
        mean = own.clone(memory_format=torch.contiguous_format)
        self._ranks.add_up(mean)
        return mean / self._ranks.size

    def computing(self, cut: SequenceCut) -> DividedAttention:
        """Return the context in which attention is divided."""
        return DividedAttention(cut, self._ranks, self._method)
