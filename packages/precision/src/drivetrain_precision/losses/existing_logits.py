"""The cross entropy of logits in half precision, computed in fp32 without an fp32 copy of all logits."""

from typing import Any

import torch
from torch import Tensor

from drivetrain_precision.losses.token_loss import (
    TokenLoss,
    check_labels,
    reduced,
    refuse_parts,
    refuse_second_order,
    softmax_dtype,
)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the cross entropy of existing logits, with softmax and loss in fp32.

    The result equals `torch.nn.functional.cross_entropy(logits.float(), labels)`. Forward and backward make no fp32
    copies of all logits: chunks of tokens are converted one at a time. If the model can return hidden states instead,
    `chunked_cross_entropy` saves the memory of the logits too. Options, result and errors are the same in both.

    Args:
        logits: The logits, of shape (..., words): words come last, even if torch's function expects them second.
        labels: The word of each token, integers of shape (...). They are not shifted.
        ignore_index: The label of tokens without a loss.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of the target that is spread over all words, from 0 to 1.
        chunk_tokens: The number of tokens of a chunk. By default a chunk has 256 MiB of logits in fp32.

    Example:
        >>> logits, labels = torch.randn(6, 10, dtype=torch.bfloat16), torch.randint(10, (6,))
        >>> torch.allclose(cross_entropy(logits, labels), torch.nn.functional.cross_entropy(logits.float(), labels))
        True
    """
    refuse_parts(logits, "logits", "for words split by tensor parallelism, use torch's loss_parallel")
    if logits.dim() < 1:
        raise ValueError("logits have the shape (): must be (..., words)")
    check_labels(
        labels, logits.shape[:-1], "logits", hint="the words come in the last dimension of the logits"
    )
    form = TokenLoss(
        num_words=logits.shape[-1],
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        chunk_tokens=chunk_tokens,
    )
    rows = logits.reshape(-1, logits.shape[-1])
    losses: Tensor = _ExistingLogits.apply(rows, labels.reshape(-1), form)  # pyright: ignore[reportAssignmentType]
    return reduced(losses, labels, ignore_index, reduction)


class _ExistingLogits(torch.autograd.Function):
    """The function from logits (tokens, words) to the loss of each token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, form: TokenLoss) -> Tensor:
        dtype = softmax_dtype(logits.dtype)
        losses, log_sum = (torch.empty(len(logits), dtype=dtype, device=logits.device) for _ in range(2))
        for rows, label, loss, total in zip(
            *(each.split(form.chunk_size) for each in (logits, labels, losses, log_sum)), strict=True
        ):
            found = form.losses(rows.to(dtype, copy=True), label)
            loss.copy_(found[0])
            total.copy_(found[1])
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.form = form
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        (outer,) = grad_outputs
        logits, labels, log_sum = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows, label, total, weight, result in zip(
            *(each.split(ctx.form.chunk_size) for each in (logits, labels, log_sum, outer, gradient)),
            strict=True,
        ):
            result.copy_(ctx.form.gradient(rows.to(total.dtype, copy=True), label, total, weight))
        return gradient, None, None
