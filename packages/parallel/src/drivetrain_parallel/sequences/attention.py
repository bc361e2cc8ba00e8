"""Attention over a sequence of which each rank holds a part.

By "heads" (Ulysses, Jacobs et al. 2023), ranks exchange so that each computes some of the heads over the whole
sequence, by any kernel and under any mask. By "gathered" keys and values, each rank computes all heads of its own
queries, as Llama 3 does (Meta 2024): no number of heads is needed.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from drivetrain_parallel.compat import unseen_by_modes
from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.ranks import TensorRanks, exchange, gather
from drivetrain_parallel.sequences.positions import SequenceCut

METHODS = ("heads", "gathered")


class DividedAttention(TorchFunctionMode):
    """A context in which `scaled_dot_product_attention` sees the sequence of all ranks.

    It is given this rank's part of query, key and value, of shape (..., heads, own_length, width), and the mask of
    the whole sequence, and returns this rank's part of the output. Called on all ranks.

    Args:
        cut: The division of the sequence.
        ranks: The ranks that divide it.
        method: The way; None for "heads" where the ranks divide their number, and "gathered" elsewhere.
    """

    def __init__(self, cut: SequenceCut, ranks: TensorRanks, method: str | None) -> None:
        super().__init__()
        self._cut, self._ranks, self._method = cut, ranks, method

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Divide attention; call any other function as it is."""
        del types
        call = self._attend if func is F.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        own = self._cut.own_length
        if (query.shape[-2], key.shape[-2]) != (own, own):
            raise ParallelPlanError(
                f"attention of {query.shape[-2]} queries to {key.shape[-2]} keys, where each rank holds {own} "
                "positions of one sequence: attention to another sequence, or to a cache of earlier tokens, cannot "
                "be divided along it; leave parallel.context out"
            )
        num_heads = query.shape[-3] if query.dim() > 2 else 1
        divides = num_heads % self._ranks.size == 0
        if self._method == "heads" and not divides:
            raise ParallelPlanError(
                f"{num_heads} heads among {self._ranks.size} ranks, which do not divide them: leave the method out, "
                "or choose 'gathered'"
            )
        attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, **options)
        divide = self._by_heads if divides and self._method != "gathered" else self._by_gathering
        return divide(query, key, value, attn_mask, is_causal, attend)

    def _by_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        attend: Callable[..., Tensor],
    ) -> Tensor:
        size, rank = self._ranks.size, self._ranks.rank
        # Each rank needs the keys and values of its own heads: those that several ranks share are copied.
        copies = size // gcd(key.shape[-3], size)
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, -3) for tensor in (key, value))
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            num_heads = query.shape[-3] // size
            mask = mask.narrow(-3, rank * num_heads, num_heads)
        query, key, value = (self._to_heads(tensor) for tensor in (query, key, value))
        return self._from_heads(attend(query, key, value, mask, is_causal=is_causal))

    def _to_heads(self, tensor: Tensor) -> Tensor:
        """Return some of the heads of the whole sequence for all heads of a part of it."""
        parts = tensor.unflatten(-3, (self._ranks.size, -1)).movedim(-4, 0)
        received = exchange(parts, self._ranks).movedim(0, -3)  # (..., heads, ranks, own_length, width)
        return received.flatten(-3, -2).index_select(-2, self._cut.order)

    def _from_heads(self, tensor: Tensor) -> Tensor:
        """Return all heads of this rank's part of the sequence."""
        padded = tensor.index_select(-2, self._cut.all_positions)
        parts = padded.unflatten(-2, (self._ranks.size, -1)).movedim(-3, 0)
        return exchange(parts, self._ranks).movedim(0, -4).flatten(-4, -3)

    def _by_gathering(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        attend: Callable[..., Tensor],
    ) -> Tensor:
        cut, ranks = self._cut, self._ranks
        key, value = (gather(tensor, -2, ranks).index_select(-2, cut.order) for tensor in (key, value))
        if not is_causal or mask is not None:
            if mask is not None and mask.shape[-2] == cut.length:
                mask = mask.index_select(-2, cut.positions(ranks.rank))
            return attend(query, key, value, mask, is_causal=is_causal)
        outputs: list[Tensor] = []
        for rows, (start, stop) in zip(query.split(cut.chunk, -2), cut.chunks(ranks.rank), strict=True):
            real, beyond = rows.split([stop - start, cut.chunk - (stop - start)], -2)
            if stop > start:
                seen = (key.narrow(-2, 0, stop), value.narrow(-2, 0, stop))
                with unseen_by_modes():  # a tensor that one has seen can be of no other class
                    from torch.nn.attention.bias import causal_lower_right  # which imports torch's compiler

                    bias = causal_lower_right(stop - start, stop)
                outputs.append(attend(real, *seen, bias))
            # What is beyond the end is dropped, but its gradient, which is zero, is awaited by other ranks.
            if beyond.shape[-2]:
                outputs.append(attend(beyond, key, value))
        return torch.cat(outputs, -2)
