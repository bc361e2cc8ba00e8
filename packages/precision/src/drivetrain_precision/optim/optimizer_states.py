"""The number of bits in which an optimizer keeps its states, read from its live tensors.

Low-bit optimizers keep a state in floating point if it is small or not a whole number of blocks. The size of the
rank's shard counts, so that sharding makes states small.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_LEAST = 4096  # elements, from which torchao and bitsandbytes quantise
_CODES = frozenset({torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStates:
    """The states that one rank keeps for an optimizer.

    Attributes:
        optimizer: The name of the optimizer's class.
        num_low_bit: The number of parameters with a state in 8 bits or fewer.
        num_floating: The number of parameters whose states are all in floating point.
        elements: The number of elements of all parameters with a state.
        elements_low_bit: The number of elements of parameters with a state in 8 bits or fewer.
        size_bytes: The size of all states in bytes, tables included.
        reasons: The reasons for states in floating point, with the number of parameters for each reason.
    """

    optimizer: str
    num_low_bit: int
    num_floating: int
    elements: int
    elements_low_bit: int
    size_bytes: int
    reasons: Mapping[str, int]

    def __str__(self) -> str:
        if not self.elements:
            return f"{self.optimizer}: no states yet"
        share = f"{100 * self.elements_low_bit / self.elements:.4g} % of elements"
        text = (
            f"{self.optimizer}: {self.num_low_bit} of {self.num_low_bit + self.num_floating} parameters ({share}) in "
            f"8 bits or fewer, {8 * self.size_bytes / self.elements:.3g} bits an element"
        )
        why = "; ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        return f"{text}; in floating point: {why}" if why else text


def is_low_bit(optimizer: Optimizer) -> bool:
    """Return whether an optimizer of torchao or bitsandbytes is built to keep states in 8 bits or fewer."""
    options = getattr(optimizer, "args", None)
    return _block_size(optimizer) is not None or getattr(options, "optim_bits", 32) <= 8


def optimizer_states(optimizer: Optimizer) -> OptimizerStates:
    """Return the bits of an optimizer's states on this rank. Any library's optimizer works, after its first step."""
    low_bit, floating = list[int](), list[int]()
    memory: dict[int, int] = {}
    state: Mapping[Any, Any] = getattr(optimizer, "state", {})
    for parameter, kept in state.items():
        if not isinstance(parameter, Tensor) or not isinstance(kept, Mapping):
            continue
        size = local_of(parameter).numel()
        tensors = [local_of(value) for value in kept.values() if isinstance(value, Tensor)]
        memory |= {part.data_ptr(): part.nbytes for value in tensors for part in _parts(value) if part.nbytes}
        if size and any(_is_low_bit(value, size) for value in tensors):
            low_bit.append(size)
        elif size and any(value.numel() == size for value in tensors):
            floating.append(size)
    return OptimizerStates(
        optimizer=type(optimizer).__name__,
        num_low_bit=len(low_bit),
        num_floating=len(floating),
        elements=sum(low_bit) + sum(floating),
        elements_low_bit=sum(low_bit),
        size_bytes=sum(memory.values()),
        reasons=Counter(_explain_floating(optimizer, size) for size in floating)
        if is_low_bit(optimizer)
        else {},
    )


def _explain_floating(optimizer: Optimizer, size: int) -> str:
    least = getattr(getattr(optimizer, "args", None), "min_8bit_size", _LEAST)
    if size < least:
        return f"of fewer than {least} elements"
    block_size = _block_size(optimizer)
    if block_size is not None and size % block_size:
        return f"of no whole number of blocks of {block_size}"
    return "loaded or overridden so"


def _block_size(optimizer: Optimizer) -> int | None:
    """Return the number of elements that share a scale; infinity for torchao's optimizers without blocks."""
    size = getattr(optimizer, "block_size", None)
    return size if isinstance(size, int) else None


def local_of(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor; other tensors are returned unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_low_bit(value: Tensor, size: int) -> bool:
    codes = max((part.numel() for part in _parts(value) if part.dtype in _CODES), default=0)
    return codes * 4 >= size  # a code of 2 bits is the smallest; a table of codes is far smaller than a state


def _parts(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors inside a tensor subclass."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _parts(getattr(value, name))
    else:
        yield value
