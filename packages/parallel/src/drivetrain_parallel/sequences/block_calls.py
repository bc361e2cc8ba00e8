"""The call of a block whose sequences are divided: its arguments, of which each rank takes its part."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from drivetrain_parallel.outputs.divided_tensor import DividedTensor, own_states
from drivetrain_parallel.outputs.layout import PartLayout
from drivetrain_parallel.sequences.positions import SequenceCut


class SequenceDivision(Protocol):
    """A way in which the blocks of a model compute on parts of sequences.

    Attributes:
        needed: The condition for blocks to be divided so, for errors: "..., or leave SETTING out".
    """

    needed: str

    def take(self, tensor: Tensor, dim: int, cut: SequenceCut) -> Tensor:
        """Return this rank's positions, along `dim`, of a tensor that all ranks hold whole. Called on all ranks."""
        ...

    def layout(self, states: Tensor, rows: Tensor) -> PartLayout:
        """Return the layout of the parts that a block computes, (batch, own_length, width), as `rows` say."""
        ...

    def argument(self, tensor: Tensor, cut: SequenceCut) -> Tensor:
        """Return what a block is given in place of another argument, which is that of the whole sequence."""
        ...

    def gradient(self, own: Tensor) -> Tensor:
        """Return the gradient of a parameter, of a loss that all ranks compute, from this rank's. Called on all."""
        ...

    def computing(self, cut: SequenceCut) -> AbstractContextManager[object]:
        """Return the context in which a block computes."""
        ...


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
        return _changed(self.args, change, other), _changed(self.kwargs, change, other)


def _changed(value: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any]) -> Any:
    # A function at the top: one that calls itself inside another would keep the tensors alive, as a cycle.
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_changed(one, change, other) for one in value)
    if type(value) is dict:
        return {key: _changed(one, change, other) for key, one in value.items()}
    return other(value)


def run_on_part(
    forward: Callable[..., Any], call: BlockCall, cut: SequenceCut, rows: Tensor, division: SequenceDivision
) -> Any:
    """Return what a block makes of this rank's part of a call, of tensors that are whole or divided so."""

    def own(tensor: Tensor) -> Tensor:
        part = own_states(tensor, rows)
        if part is not None:
            return part
        whole = tensor.joined("a block") if type(tensor) is DividedTensor else tensor
        return division.take(whole, 1, cut) if tensor is states else division.argument(whole, cut)

    states = call.states
    args, kwargs = call.changed(own)
    with division.computing(cut):
        return forward(*args, **kwargs)


def states_of(output: Any) -> Tensor:
    """Return the hidden states that a block returns: its output, or the first of them."""
    return output if isinstance(output, Tensor) else output[0]


def with_states(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return what a block returns with its hidden states changed."""
    if isinstance(output, Tensor):
        return change(output)
    return type(output)((change(output[0]), *output[1:]))


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


def shortened(tensor: Tensor, length: int, shorter: int) -> Tensor:
    """Return the first positions of an argument of a whole sequence."""
    dim = sequence_dim(tensor, length)
    dims = [at for at in (-1, -2)[: tensor.dim()] if tensor.shape[at] == length] if dim is None else [dim]
    for at in dims:
        tensor = tensor.narrow(at, 0, shorter)
    return tensor
