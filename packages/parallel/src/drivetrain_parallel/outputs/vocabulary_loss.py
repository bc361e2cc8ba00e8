"""The cross entropy of logits of which each rank holds a part: ranks exchange up to three numbers a row, no logits.

A row's loss needs the sum of exponentials over all words, and the target's logit. Each rank computes what its words
add to the one, and one of them holds the other. The gradient, softmax minus target, needs nothing more of others.
"""

from collections.abc import Iterator
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drivetrain_parallel.outputs.layout import PartLayout
from drivetrain_parallel.ranks import TensorRanks

# The logits that are widened or exponentiated at a time: 16 MiB in fp32, and more of many, so that few operations are
# issued.
_ELEMENTS, _MOST_CHUNKS = 2**22, 16
_ELSEWHERE = torch.iinfo(torch.int32).min  # a target without a word here: of another rank, or to be ignored


def cross_entropy_of_parts(
    part: Tensor,
    target: Tensor,
    layout: PartLayout,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return what `F.cross_entropy` computes of the joined logits, in fp32 (fp64 for fp64). Called on all ranks.

    Backward sends no logits: each rank computes the gradient of its own. There are no gradients of gradients.

    Args:
        part: The logits that this rank holds, of shape (own rows, own words).
        target: The word of each row of the whole among all words, int64 of shape (rows,), the same on all ranks.
        layout: The layout of parts.
        weight: The weight of each of all words; None for 1.
        ignore_index: The target of rows without a loss.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of the target that is spread over all words, from 0 to 1.

    Raises:
        IndexError: A target is no word. On a device, its own assertion fails instead.
    """
    ranks, sizes = layout.column_ranks, layout.sizes
    first, num_words = sum(sizes[: ranks.rank]), sum(sizes)
    last = first + sizes[ranks.rank]
    kept = target != ignore_index
    if target.device.type == "cpu" and (is_bad := kept & ((target < 0) | (target >= num_words))).any():
        raise IndexError(f"Target {target[is_bad][0].item()} is out of bounds.")
    is_own = (first <= target) & (target < last)
    is_of_others = (target >= 0) & (target < num_words) & ~is_own
    own = torch.where(is_own, target - first, target).masked_fill(is_of_others | ~kept, _ELSEWHERE)
    weight = None if weight is None else weight.to(_wide(part.dtype))
    spread = None
    if label_smoothing:
        ones = part.new_ones(sizes[ranks.rank], dtype=_wide(part.dtype))
        spread = ones if weight is None else weight[first:last]
    found = _RowSums.apply(part, layout.own_rows(own, _ELSEWHERE), spread, ranks)
    log_sum, sums = (layout.in_order(one) for one in found)
    scale = kept.to(log_sum.dtype)
    if weight is not None:
        scale = scale * weight[target.masked_fill(~kept, 0)]
    losses = (log_sum - sums[:, 0]) * scale
    if label_smoothing:
        total = num_words if weight is None else weight.sum()
        smooth = (total * log_sum - sums[:, 1]) * (label_smoothing / num_words)
        losses = (1 - label_smoothing) * losses + smooth
    losses = torch.where(kept, losses, 0)  # also where an ignored row is not finite
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / scale.sum()


class _RowSums(Function):
    """The sums of each row over all words: the log of that of exponentials, (rows,), and others, (rows, 1 or 2).

    The others are the target's logit and, with a `spread` of shape (own words,), the sum of logits weighted by it.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, own: Tensor, spread: Tensor | None, ranks: TensorRanks
    ) -> tuple[Tensor, Tensor]:
        found = torch.cat([_sums(rows, target, spread) for rows, target in _chunks(part, own)])
        num_sums = found.shape[1]
        of_ranks = ranks.join(found, 1, (num_sums,) * ranks.size).unflatten(1, (ranks.size, num_sums))
        log_sum = of_ranks[..., 0].logsumexp(1)
        ctx.save_for_backward(part, own, spread, log_sum)
        return log_sum, of_ranks[..., 1:].sum(1)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the cross entropy of divided logits has no gradients of gradients (create_graph=True): give it "
                "`torch.cat([logits])`, which is the whole"
            )
        part, own, spread, log_sum = ctx.saved_tensors
        gradient = torch.empty_like(part)
        for chunk in _chunks(part, own, log_sum, *outer, gradient):
            _write_gradient(chunk, spread)
        return gradient, None, None, None


def _sums(rows: Tensor, own: Tensor, spread: Tensor | None) -> Tensor:
    """Return what this rank's words add to the sums of some rows, of shape (rows, 2 or 3)."""
    rows = rows.to(_wide(rows.dtype))
    at_target = -F.nll_loss(rows, own, ignore_index=_ELSEWHERE, reduction="none")
    more = () if spread is None else ((rows * spread).sum(1),)
    return torch.stack((rows.logsumexp(1), at_target, *more), 1)


def _write_gradient(chunk: tuple[Tensor, ...], spread: Tensor | None) -> None:
    """Write the gradient of some rows, from those of what `_RowSums` returned."""
    rows, own, log_sum, of_log_sum, of_sums, result = chunk
    wide = result.copy_(rows) if result.dtype is log_sum.dtype else rows.to(log_sum.dtype)
    wide.sub_(log_sum[:, None]).exp_().mul_(of_log_sum[:, None])
    is_elsewhere = own == _ELSEWHERE
    at_target = of_sums[:, 0].masked_fill(is_elsewhere, 0)
    wide.scatter_add_(1, own.masked_fill(is_elsewhere, 0)[:, None], at_target[:, None])
    if spread is not None:
        wide.add_(of_sums[:, 1:] * spread)
    if wide is not result:
        result.copy_(wide)


def _chunks(part: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield some rows at a time of the logits and of tensors with as many rows."""
    num_rows = max(1, _ELEMENTS // part.shape[1], ceil(len(part) / _MOST_CHUNKS))
    return zip(*(one.split(num_rows) for one in (part, *others)), strict=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
