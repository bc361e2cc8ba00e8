"""A linear head and its cross entropy by chunks of tokens: the logits of all tokens never exist together.

The backward computes the logits of each chunk again. Other implementations compute gradients in the forward, which
saves one matrix product of four. But small gradients computed before the loss scale is known round to zero in fp16;
the weight's fp32 gradient would be held together with the whole model's activations; and a second backward, or a
different factor for each token, would be impossible.
"""

from collections.abc import Iterator
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

# The most elements of a product that is added to a gradient of another dtype: it takes 32 MiB in bf16.
_MAX_PRODUCT = 2**24


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the cross entropy of `hidden @ weight.T + bias`, a chunk of tokens at a time.

    Logits are computed in `logits_dtype`; softmax, loss and the sums of the weight's gradient in fp32 (in fp64 for
    logits in fp64). Neither forward nor backward holds the logits of all tokens or their copy in fp32: the backward
    computes each chunk's logits again. There are no gradients of gradients.

    Args:
        hidden: The last hidden state, of shape (..., hidden size).
        weight: The weight of the head, of shape (words, hidden size); it may be tied to the embedding, or frozen.
        labels: The word of each token, integers of shape (...). They are not shifted.
        bias: The bias of the head, of shape (words,).
        ignore_index: The label of tokens without a loss.
        reduction: "mean" over the tokens that are not ignored (nan if all are ignored, as in torch), "sum" or
            "none". To accumulate gradients, take the "sum" and pass the number of tokens to
            `Accelerator.backward(loss, count=...)`.
        label_smoothing: The share of the target that is spread over all words, from 0 to 1.
        logit_softcap: A bound of the logits, `softcap * tanh(logits / softcap)`, as in Gemma 2.
        logits_dtype: The dtype of the matrix products. By default the dtype of an active autocast, else the common
            dtype of `hidden` and `weight`.
        chunk_tokens: The number of tokens of a chunk. By default a chunk has 256 MiB of logits in fp32.

    Returns:
        The loss in fp32 (fp64 for logits in fp64), of shape (), or of the shape of `labels` for "none".

    Raises:
        TypeError: The labels are not integers; dtypes differ without a `logits_dtype`; or the weight is sharded.
        ValueError: Shapes do not fit, or a value is outside its range.

    Example:
        >>> hidden, weight = torch.randn(6, 4), torch.randn(10, 4)
        >>> labels = torch.randint(10, (6,))
        >>> loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=2)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, labels))
        True
    """
    _check_shapes(hidden, weight, bias)
    check_labels(
        labels,
        hidden.shape[:-1],
        "hidden",
        hint="for the next word, shift both: hidden[:, :-1] and labels[:, 1:]",
    )
    form = TokenLoss(
        num_words=weight.shape[0],
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_softcap=logit_softcap,
        chunk_tokens=chunk_tokens,
    )
    dtype = _logits_dtype(hidden, weight, logits_dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    losses: Tensor = _ChunkedHead.apply(rows, weight, bias, labels.reshape(-1), form, dtype)  # pyright: ignore[reportAssignmentType]
    return reduced(losses, labels, ignore_index, reduction)


class _ChunkedHead(torch.autograd.Function):
    """The function from hidden states (tokens, hidden size) to the loss of each token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        form: TokenLoss,
        dtype: torch.dtype,
    ) -> Tensor:
        losses, log_sum = (
            torch.empty(len(hidden), dtype=softmax_dtype(dtype), device=hidden.device) for _ in range(2)
        )
        with torch.autocast(hidden.device.type, enabled=False):  # it would cast products in fp32
            cast = weight.to(dtype)
            for chunk in _chunks(len(hidden), form.chunk_size):
                logits = _logits(hidden[chunk].to(dtype), cast, bias)
                losses[chunk], log_sum[chunk] = form.losses(logits, labels[chunk])
        ctx.save_for_backward(hidden, weight, bias, labels, log_sum)
        ctx.form, ctx.dtype = form, dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        (outer,) = grad_outputs
        hidden, weight, bias, labels, log_sum = ctx.saved_tensors
        sums = [
            torch.zeros_like(each, dtype=log_sum.dtype, memory_format=torch.contiguous_format)
            if needed
            else None
            for each, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        ]
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(ctx.dtype)
            for chunk in _chunks(len(hidden), ctx.form.chunk_size):
                rows = hidden[chunk].to(ctx.dtype)
                logits = _logits(rows, cast, bias)
                gradient = ctx.form.gradient(logits, labels[chunk], log_sum[chunk], outer[chunk])
                if sums[1] is not None:
                    sums[1] += gradient.sum(dim=0)
                gradient = gradient.to(ctx.dtype)
                if hidden_gradient is not None:
                    hidden_gradient[chunk] = gradient @ cast
                if sums[0] is not None and sums[0].dtype == rows.dtype:
                    sums[0].addmm_(gradient.T, rows)
                elif sums[0] is not None:
                    for words in _chunks(len(weight), max(1, _MAX_PRODUCT // max(1, rows.shape[1]))):
                        sums[0][words] += gradient[:, words].T @ rows
        found = [
            None if total is None else total.to(each.dtype)
            for total, each in zip(sums, (weight, bias), strict=True)
        ]
        return hidden_gradient, *found, None, None, None


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a new tensor of logits in the softmax's dtype; the products have rounded them to their dtype before."""
    logits = torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(weight.dtype))
    return logits.to(softmax_dtype(weight.dtype))


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _logits_dtype(hidden: Tensor, weight: Tensor, requested: torch.dtype | None) -> torch.dtype:
    if requested is not None:
        if not isinstance(requested, torch.dtype) or not requested.is_floating_point:  # pyright: ignore[reportUnnecessaryIsInstance] a user may give a name
            raise TypeError(
                f"logits_dtype={requested!r}: must be a floating-point dtype, such as torch.bfloat16"
            )
        return requested
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:  # as torch: it leaves fp64 alone
        return torch.get_autocast_dtype(kind)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"hidden is in {hidden.dtype} and weight in {weight.dtype}: choose the dtype of their products by "
            "logits_dtype=, or call this under autocast"
        )
    return hidden.dtype


def _check_shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    repair = (
        "under FSDP2, call the loss in the forward of the module whose block holds the head, or call "
        "`head.unshard()` on the head's FSDP module before the loss; vocabularies split by tensor parallelism "
        "have `torch.distributed.tensor.parallel.loss_parallel`"
    )
    for name, tensor in (("weight", weight), ("bias", bias), ("hidden", hidden)):
        if tensor is not None:
            refuse_parts(tensor, name, repair)
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has the shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}: must be "
            "(..., hidden size) and (words, hidden size), as of nn.Linear"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has the shape {tuple(bias.shape)}: must be ({weight.shape[0]},), one for each word"
        )
