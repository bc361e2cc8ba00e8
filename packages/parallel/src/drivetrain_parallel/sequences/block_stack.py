"""A stack of blocks that computes on parts of sequences, while the model around it sees the whole.

The first block takes this rank's part of the hidden states, and the last one joins the parts. A `SequenceDivision`
says how, and what else is divided inside. This is compared once with what a block computes undivided.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.ranks import TensorRanks
from drivetrain_parallel.sequences.positions import SequenceCut
from drivetrain_parallel.streams import RankStream

_MARK = "_computes_on_parts"
_SAMPLE = 32  # positions a rank, of which a block is compared
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest value; 5e-2 for narrower dtypes


class SequenceDivision(Protocol):
    """A way in which the blocks of a model compute on parts of sequences.

    Attributes:
        needed: The condition for blocks to be divided so, for errors: "..., or leave SETTING out".
    """

    needed: str

    def take(self, states: Tensor, cut: SequenceCut) -> Tensor:
        """Return this rank's part of whole hidden states (batch, length, width). Called on all ranks."""
        ...

    def join(self, states: Tensor, cut: SequenceCut) -> Tensor:
        """Return the whole of which all ranks hold parts (batch, own_length, width). Called on all ranks."""
        ...

    def argument(self, tensor: Tensor, cut: SequenceCut) -> Tensor:
        """Return what a block is given in place of another argument, which is that of the whole sequence."""
        ...

    def computing(self, cut: SequenceCut) -> AbstractContextManager[object]:
        """Return the context in which a block computes."""
        ...


def divide_blocks(model: nn.Module, stack: "BlockStack") -> None:
    """Have the blocks of a model run as a stack."""
    for name in stack.blocks:
        block = model.get_submodule(name)
        kind = type(block)

        def forward(self: nn.Module, *args: Any, _name: str = name, _kind: Any = kind, **kwargs: Any) -> Any:
            return stack.run(_name, self, partial(_kind.forward, self), args, kwargs)

        members = {"forward": forward, _MARK: True, "__module__": kind.__module__}
        block.__class__ = type(kind.__name__, (kind,), members)
    model.register_forward_pre_hook(stack.begin)
    model.register_forward_hook(stack.end, always_call=True)


def has_divided_sequences(model: nn.Module) -> bool:
    """Return whether ranks divide the sequences of a model."""
    return any(hasattr(type(module), _MARK) for module in model.modules())


class BlockStack:
    """The blocks of a model that compute on this rank's part of each sequence."""

    def __init__(
        self,
        blocks: Sequence[str],
        compared: Iterable[str],
        ranks: TensorRanks,
        stream: RankStream,
        division: SequenceDivision,
    ) -> None:
        self.blocks, self._ranks, self._stream, self._division = blocks, ranks, stream, division
        self.is_whole = False  # whether a block computes on whole sequences, to be compared
        self._is_running = False
        self._cut: SequenceCut | None = None  # of the sequences that the model is running on
        # The numbers of positions of whole sequences, by those of a rank's part: for blocks that backward runs again.
        self._lengths: defaultdict[int, set[int]] = defaultdict(set)
        self._to_compare = set(compared)
        self._sample = torch.empty(0)  # hidden states on which blocks are compared

    def begin(self, *_: object) -> None:
        """Begin a forward of the model."""
        self._stream.forget()
        self._is_running, self._cut = True, None

    def end(self, *_: object) -> None:
        """End a forward, also one that failed between the blocks."""
        self._stream.close()
        self._is_running, self._cut = False, None

    def run(
        self,
        name: str,
        block: nn.Module,
        whole: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a block on this rank's part, the first on what it takes of the whole; the last one joins the parts.

        Args:
            name: The name of the block.
            block: The module of that name.
            whole: The undivided forward.
            args: The arguments of the call; the first tensor is hidden states of shape (batch, positions, width).
            kwargs: The keyword arguments, such as masks and positions, which are those of the whole sequence.
        """
        call = BlockCall(args, kwargs)
        is_first = name == self.blocks[0]
        cut = self._first_cut(call.states) if is_first else self.current_cut(call.states)
        if name in self._to_compare:
            self._compare(name, block, whole, call, cut)
        self._stream.open()
        try:
            output = self._run_part(whole, call, cut, takes_part=is_first)
        finally:  # a checkpoint ends a block that it runs again by an exception, once it has what it needs
            self._stream.close()
        if name != self.blocks[-1]:
            return output
        return self.with_states(output, lambda states: self._division.join(states, cut))

    @staticmethod
    def with_states(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return what a block returns with its hidden states changed: its output, or the first of them."""
        if isinstance(output, Tensor):
            return change(output)
        return type(output)((change(output[0]), *output[1:]))

    def current_cut(self, states: Tensor) -> SequenceCut:
        """Return the division of the sequences of which a block is given this rank's part."""
        self._check(states)
        own = states.shape[1]
        if self._cut is not None and self._cut.own_length == own:
            return self._cut
        lengths = self._lengths[own]
        if len(lengths) != 1:
            multiple = 2 * self._ranks.size
            raise ParallelPlanError(
                f"backward runs a block again on {own} positions of a rank, which are part of sequences of "
                f"{sorted(lengths)} positions: pad sequences to a multiple of {multiple}, or leave activation "
                "checkpointing out"
            )
        return SequenceCut(length=next(iter(lengths)), size=self._ranks.size, device=states.device)

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
        self._lengths[cut.own_length].add(cut.length)
        if self._is_running:
            self._cut = cut
        return cut

    def _check(self, states: Tensor) -> None:
        if states.dim() != 3 or not states.is_floating_point():
            raise ParallelPlanError(
                f"{self.blocks[0]}, or a block of its class, is given a tensor of shape {tuple(states.shape)} first, "
                f"where hidden states of shape (batch, positions, width) were expected: {self._division.needed}"
            )

    def _run_part(
        self, whole: Callable[..., Any], call: "BlockCall", cut: SequenceCut, *, takes_part: bool
    ) -> Any:
        def own(tensor: Tensor) -> Tensor:
            if tensor is not call.states:
                return self._division.argument(tensor, cut)
            return self._division.take(tensor, cut) if takes_part else tensor

        args, kwargs = call.changed(own)
        with self._division.computing(cut):
            return whole(*args, **kwargs)

    @torch.no_grad()
    def _compare(
        self, name: str, block: nn.Module, whole: Callable[..., Any], call: "BlockCall", cut: SequenceCut
    ) -> None:
        """Refuse a block that computes other values on divided sequences: on the first positions of its arguments."""
        if name == self.blocks[0]:
            self._sample = call.states[:, : _SAMPLE * cut.size].detach().clone()
        first = SequenceCut(length=self._sample.shape[1], size=cut.size, device=cut.device)

        def shorten(tensor: Tensor) -> Tensor:
            return self._sample if tensor is call.states else _shortened(tensor, cut.length, first.length)

        with _DetachedCopies():
            args, kwargs = call.changed(shorten, deepcopy)
            own = BlockCall(*BlockCall(args, kwargs).changed(lambda tensor: tensor, deepcopy))
        modes = [(module, module.training) for module in block.modules()]
        running, self.is_whole = self._cut, True
        try:
            block.eval()
            expected = states_of(whole(*args, **kwargs)).index_select(1, first.positions(self._ranks.rank))
            self._cut, self.is_whole = first, False
            found = states_of(self._run_part(whole, own, first, takes_part=True))
        except ParallelPlanError:
            raise
        except Exception as error:
            raise ParallelPlanError(
                f"{name} does not run on divided sequences: {self._division.needed}"
            ) from error
        finally:
            self._cut, self.is_whole = running, False
            for module, mode in modes:
                module.training = mode
        largest = _TOLERANCE.get(expected.dtype, 5e-2) * expected.abs().max().item()
        differs = torch.zeros((), device=cut.device)
        if found.shape != expected.shape or not torch.allclose(found, expected, 0.0, largest, equal_nan=True):
            differs += 1
        self._ranks.add_up(differs)
        if differs.item():
            raise ParallelPlanError(
                f"{name} computes other values on divided sequences: {self._division.needed}"
            )
        self._to_compare.discard(name)


class _DetachedCopies(TorchFunctionMode):
    """A context in which tensors that autograd follows can be copied, such as those of a cache of keys and values."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy a tensor's values alone; call any other function as it is."""
        del types
        return args[0].detach().clone() if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class BlockCall:
    """The arguments of a block's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def states(self) -> Tensor:
        """The hidden states: the first tensor."""
        found = next(
            (value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)), None
        )
        return torch.empty(0) if found is None else found

    def changed(
        self, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda value: value
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with each tensor changed, also in lists and dicts; `other` changes other values."""

        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if type(value) in (tuple, list):
                return type(value)(map(changed, value))
            return {key: changed(one) for key, one in value.items()} if type(value) is dict else other(value)

        return changed(self.args), changed(self.kwargs)


def sequence_dim(tensor: Tensor, length: int) -> int | None:
    """Return the dimension of an argument that each rank takes its part of; None for one that stays whole.

    Positions are along dimension 1, or 0 without a batch, or the last but one of four, as in tables of rotary
    embeddings. A mask stays whole: it is boolean, or of shape (length, length) or (..., ..., ..., length).
    """
    shape = tensor.shape
    if tensor.dtype == torch.bool or (tensor.is_floating_point() and shape == (length, length)):
        return None
    if len(shape) == 4:
        candidates = () if shape[-1] == length else (1, 2)
    else:
        candidates = (1, 0) if len(shape) > 1 else range(len(shape))
    return next((dim for dim in candidates if shape[dim] == length), None)


def _shortened(tensor: Tensor, length: int, shorter: int) -> Tensor:
    """Return the first positions of an argument of a whole sequence."""
    dim = sequence_dim(tensor, length)
    dims = [at for at in (-1, -2)[: tensor.dim()] if tensor.shape[at] == length] if dim is None else [dim]
    for at in dims:
        tensor = tensor.narrow(at, 0, shorter)
    return tensor


def states_of(output: Any) -> Tensor:
    """Return the hidden states that a block returns: its output, or the first of them."""
    return output if isinstance(output, Tensor) else output[0]
