"""Blocks that compute on parts of sequences, while the model around them sees the whole.

A block takes this rank's part of hidden states that are whole, and returns a `DividedTensor`, which is whole for
whatever looks at it; the next block goes on with the part that it holds. So a model may run its blocks in any order,
leave some out, and use the states between them. A `SequenceDivision` says what else is divided inside. A block of
each make is tried at its first run.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.layers.divided_layers import with_forward
from drivetrain_parallel.outputs.divided_tensor import divided
from drivetrain_parallel.ranks import TensorRanks
from drivetrain_parallel.sequences.block_calls import BlockCall, SequenceDivision, run_on_part, with_states
from drivetrain_parallel.sequences.block_trial import BlockTrial
from drivetrain_parallel.sequences.positions import SequenceCut
from drivetrain_parallel.streams import RankStream

_MARK = "takes_its_part"  # an attribute of the class of a block, which counters of operations read
_TRIED = 32  # positions a rank, on which a block is tried


def divide_blocks(model: nn.Module, stack: "BlockStack") -> None:
    """Have the blocks of a model run as a stack."""
    run: Any = torch.compiler.disable(stack.run)  # a compiler would lose the graph between part and whole
    for name in stack.blocks:
        with_forward(model.get_submodule(name), partial(run, name), **{_MARK: True})
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
        self._calls = count()
        self._running: SequenceCut | None = None  # of the sequences that a block is running on
        self._last = SequenceCut(length=0, size=ranks.size)
        # By batch size and cut, of tensors that are alive: those of one layout are known by it.
        self._rows = WeakValueDictionary[tuple[Any, ...], Tensor]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the stack itself: a copy of the model computes with the same ranks, as its blocks' classes do."""
        return self

    def begin(self, *_: object) -> None:
        """Begin a forward of the model."""
        self._stream.forget()

    def end(self, *_: object) -> None:
        """End a forward, also one that failed inside a block."""
        self._stream.close()

    def run(self, name: str, block: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block on this rank's part of its hidden states.

        In evaluation the last block joins the parts, so that one rank may look at what the model returns.

        Args:
            name: The name of the block.
            block: The module of that name.
            whole: The forward of its former class.
            args: The arguments of the call; the first tensor is hidden states of shape (batch, positions, width).
            kwargs: The keyword arguments, such as masks and positions, which are those of the whole sequence.
        """
        call = BlockCall(args, kwargs)
        cut = self._cut_of(call.states)
        if name in self._trials:
            self._try(name, block, call, cut)
        rows = self._rows_of(len(call.states), cut)
        self._stream.open()
        before, self._running = self._running, cut
        try:
            output = run_on_part(partial(whole, block), call, cut, rows, self._division)
        finally:  # a checkpoint ends a block that it runs again by an exception, once it has what it needs
            self._running = before
            self._stream.close()

        def hand_on(states: Tensor) -> Tensor:
            layout = self._division.layout(states, rows)
            if name == self.blocks[-1] and not (block.training and states.requires_grad):
                return layout.join(states.flatten(0, -2))
            return divided(states, layout, f"{name}, call {next(self._calls)}")

        return with_states(output, hand_on)

    def running_cut(self, states: Tensor) -> SequenceCut:
        """Return the division of the sequences of which a module inside a running block is given this rank's part."""
        self._check(states)
        if self._running is None or self._running.own_length != states.shape[1]:
            raise ParallelPlanError(
                f"backward runs a part of a block again, on {states.shape[1]} positions of a rank: checkpoint whole "
                "blocks, or leave activation checkpointing out"
            )
        return self._running

    def _cut_of(self, states: Tensor) -> SequenceCut:
        """Return the division of whole sequences of hidden states."""
        self._check(states)
        length, size, device = states.shape[1], self._ranks.size, states.device
        if length < 2 * size:
            raise ParallelPlanError(
                f"a sequence of {length} positions among {size} ranks, which divide those of {2 * size} or more: pad "
                "shorter ones to that; generate without a cache of earlier tokens (use_cache=False), or from an "
                "export of the model"
            )
        if (self._last.length, self._last.device) != (length, device):
            self._last = SequenceCut(length=length, size=size, device=device)
        return self._last

    def _check(self, states: Tensor) -> None:
        if states.dim() != 3 or not states.is_floating_point():
            raise ParallelPlanError(
                f"{self.blocks[0]}, or a block of its class, is given a tensor of shape {tuple(states.shape)} first, "
                f"where hidden states of shape (batch, positions, width) were expected: {self._division.needed}"
            )

    def _rows_of(self, num_sequences: int, cut: SequenceCut) -> Tensor:
        key = num_sequences, cut.length, cut.device
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = cut.rows(num_sequences)
        return rows

    def _try(self, name: str, block: nn.Module, call: BlockCall, cut: SequenceCut) -> None:
        """Refuse a block that computes other values or gradients on divided sequences. Called on all ranks."""
        first = SequenceCut(length=min(cut.length, _TRIED * cut.size), size=cut.size, device=cut.device)
        running, self._running = self._running, first
        try:
            passes = self._trials[name].passes(block, call, cut.length, first, self._division)
        except ParallelPlanError:
            raise
        except Exception as error:
            raise ParallelPlanError(
                f"{name} does not run on divided sequences: {self._division.needed}"
            ) from error
        finally:
            self._running = running
        differs = torch.tensor(float(not passes), device=cut.device)
        self._ranks.add_up(differs)
        if differs.item():
            raise ParallelPlanError(
                f"{name} computes other values or gradients on divided sequences: {self._division.needed}"
            )
        del self._trials[name]
