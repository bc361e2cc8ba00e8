"""A stack of blocks that computes on parts of sequences, while the model around it sees the whole.

The first block takes this rank's part of the hidden states, and the last one joins the parts. A `SequenceDivision`
says how, and what else is divided inside. A block of each make is tried at its first run.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn

from drivetrain_parallel.compat import tree_map_only
from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.layers.divided_layers import with_forward
from drivetrain_parallel.ranks import TensorRanks
from drivetrain_parallel.sequences.block_calls import BlockCall, SequenceDivision, run_on_part, with_states
from drivetrain_parallel.sequences.block_trial import BlockTrial
from drivetrain_parallel.sequences.positions import SequenceCut
from drivetrain_parallel.streams import RankStream

_MARK = "_computes_on_parts"
_TRIED = 32  # positions a rank, on which a block is tried


def divide_blocks(model: nn.Module, stack: "BlockStack") -> None:
    """Have the blocks of a model run as a stack."""
    for name in stack.blocks:
        with_forward(model.get_submodule(name), partial(stack.run, name), **{_MARK: True})
    model.register_forward_pre_hook(stack.begin)
    model.register_forward_hook(stack.end, always_call=True)


def has_divided_sequences(model: nn.Module) -> bool:
    """Return whether ranks divide the sequences of a model."""
    return any(hasattr(type(module), _MARK) for module in model.modules())


class BlockStack:
    """The blocks of a model that compute on this rank's part of each sequence.

    Args:
        blocks: The names of the blocks, in order.
        trials: The trials of some of them at their first run, by name; each is dropped once it has passed.
        ranks: The ranks that divide sequences.
        stream: The random numbers of this rank.
        division: The way in which blocks compute on parts.
    """

    def __init__(
        self,
        blocks: Sequence[str],
        trials: dict[str, BlockTrial],
        ranks: TensorRanks,
        stream: RankStream,
        division: SequenceDivision,
    ) -> None:
        self.blocks, self._trials = blocks, trials
        self._ranks, self._stream, self._division = ranks, stream, division
        self._is_running = self._is_followed = False
        self._cut: SequenceCut | None = None  # of the sequences that a block is running on
        self._last: SequenceCut | None = None  # of the last forward that autograd followed
        # Of forwards whose graphs are alive: backward may run their blocks again.
        self._cuts = WeakSet[SequenceCut]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the stack itself: a copy of the model computes with the same ranks, as its blocks' classes do."""
        return self

    def begin(self, *_: object) -> None:
        """Begin a forward of the model."""
        self._stream.forget()
        self._is_running, self._is_followed, self._cut = True, torch.is_grad_enabled(), None

    def end(self, model: nn.Module, args: object, output: object) -> None:
        """End a forward, also one that failed between the blocks."""
        del model, args
        self._stream.close()
        cut, self._cut, self._is_running = self._cut, None, False
        if cut is not None and self._is_followed:
            self._last = cut
            tree_map_only(Tensor, partial(_hold, cut), output)

    def run(self, name: str, block: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block on this rank's part, the first on what it takes of the whole; the last one joins the parts.

        Args:
            name: The name of the block.
            block: The module of that name.
            whole: The forward of its former class.
            args: The arguments of the call; the first tensor is hidden states of shape (batch, positions, width).
            kwargs: The keyword arguments, such as masks and positions, which are those of the whole sequence.
        """
        call = BlockCall(args, kwargs)
        is_first = name == self.blocks[0]
        cut = self._first_cut(call.states) if is_first else self.current_cut(call.states)
        if name in self._trials:
            self._try(name, block, call, cut)
        self._stream.open()
        try:
            output = run_on_part(partial(whole, block), call, cut, self._division, takes=is_first)
        finally:  # a checkpoint ends a block that it runs again by an exception, once it has what it needs
            self._stream.close()
        if name != self.blocks[-1]:
            return output
        join = self._division.leave if block.training else self._division.join
        return with_states(output, partial(join, cut=cut))

    def current_cut(self, states: Tensor) -> SequenceCut:
        """Return the division of the sequences of which a block is given this rank's part."""
        self._check(states)
        own = states.shape[1]
        if self._cut is not None and self._cut.own_length == own:
            return self._cut
        lengths = {cut.length for cut in self._cuts if cut.own_length == own}
        if len(lengths) != 1:
            raise ParallelPlanError(
                f"backward runs a block again on {own} positions of a rank, which are part of sequences of "
                f"{sorted(lengths)} positions: pad sequences to a multiple of {2 * self._ranks.size}, or leave "
                "activation checkpointing out"
            )
        return SequenceCut(length=lengths.pop(), size=self._ranks.size, device=states.device)

    def _first_cut(self, states: Tensor) -> SequenceCut:
        """Return the division of a whole sequence of hidden states."""
        self._check(states)
        cut = SequenceCut(length=states.shape[1], size=self._ranks.size, device=states.device)
        if cut.length < 2 * cut.size:
            raise ParallelPlanError(
                f"a sequence of {cut.length} positions among {cut.size} ranks, which divide those of "
                f"{2 * cut.size} or more: pad shorter ones to that; generate without a cache of earlier tokens "
                "(use_cache=False), or from an export of the model"
            )
        if self._is_running:
            self._cut = cut
            self._cuts.add(cut)
        return cut

    def _check(self, states: Tensor) -> None:
        if states.dim() != 3 or not states.is_floating_point():
            raise ParallelPlanError(
                f"{self.blocks[0]}, or a block of its class, is given a tensor of shape {tuple(states.shape)} first, "
                f"where hidden states of shape (batch, positions, width) were expected: {self._division.needed}"
            )

    def _try(self, name: str, block: nn.Module, call: BlockCall, cut: SequenceCut) -> None:
        """Refuse a block that computes other values or gradients on divided sequences. Called on all ranks."""
        first = SequenceCut(length=min(cut.length, _TRIED * cut.size), size=cut.size, device=cut.device)
        running, self._cut = self._cut, first
        try:
            passes = self._trials[name].passes(block, call, cut.length, first, self._division)
        except ParallelPlanError:
            raise
        except Exception as error:
            raise ParallelPlanError(
                f"{name} does not run on divided sequences: {self._division.needed}"
            ) from error
        finally:
            self._cut = running
        differs = torch.tensor(float(not passes), device=cut.device)
        self._ranks.add_up(differs)
        if differs.item():
            raise ParallelPlanError(
                f"{name} computes other values or gradients on divided sequences: {self._division.needed}"
            )
        del self._trials[name]


def _hold(cut: SequenceCut, output: Tensor) -> Tensor:
    """Have the graph of an output keep a cut alive for as long as backward may run blocks again."""
    if output.grad_fn is not None:
        metadata: Any = output.grad_fn.metadata  # a property, which torch declares as a method
        metadata[_MARK] = cut
    return output
