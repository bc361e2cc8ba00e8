"""The cross entropy of a chunk of tokens, and its gradient: plain functions of logits in fp32, computed in place.

Autograd records nothing here: the autograd functions of `chunked_head.py` and `existing_logits.py` call this module
in forward and backward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# The most logits of a chunk by default: their copy in fp32 takes 256 MiB, which is 512 tokens of 128,000 words.
_MAX_CHUNK_LOGITS = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The computation of a token's loss from its logits; it holds and checks the options of the public losses."""

    num_words: int
    ignore_index: int
    label_smoothing: float
    logit_softcap: float | None = None
    chunk_tokens: int | None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing!r}: must lie between 0 and 1")
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise ValueError(f"logit_softcap={self.logit_softcap!r}: must be above 0, or None for no bound")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={self.chunk_tokens!r}: must be at least 1, or None to choose it")

    @property
    def chunk_size(self) -> int:
        """The number of tokens of a chunk."""
        return self.chunk_tokens or max(1, _MAX_CHUNK_LOGITS // max(1, self.num_words))

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses, 0 for ignored tokens, and the log-sum-exps of the logits, for the gradient.

        The logits, (tokens, words) in fp32 or fp64, are overwritten; other tensors have the shape (tokens,).
        """
        if self.logit_softcap is not None:
            logits.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        counted = labels != self.ignore_index
        target = logits.gather(1, _places(labels, counted))[:, 0]
        score = target
        if self.label_smoothing:
            score = (1 - self.label_smoothing) * target + self.label_smoothing * logits.mean(dim=1)
        highest = logits.amax(dim=1, keepdim=True)
        log_sum = logits.sub_(highest).exp_().sum(dim=1).log_().add_(highest[:, 0])
        return torch.where(counted, log_sum - score, 0), log_sum

    def gradient(self, logits: Tensor, labels: Tensor, log_sum: Tensor, outer: Tensor) -> Tensor:
        """Return the gradient of the logits before the softcap, of shape (tokens, words); overwrite the logits.

        `log_sum` is the second result of `losses`; `outer` is the gradient of each token's loss. Both have the shape
        (tokens,).
        """
        slope = None
        if self.logit_softcap is not None:
            logits.div_(self.logit_softcap).tanh_()
            slope = logits.square().neg_().add_(1)
            logits.mul_(self.logit_softcap)
        counted = labels != self.ignore_index
        gradient = logits.sub_(log_sum[:, None]).exp_()
        if self.label_smoothing:
            gradient.sub_(self.label_smoothing / logits.shape[1])
        hit = torch.full_like(outer, self.label_smoothing - 1)
        gradient.scatter_add_(1, _places(labels, counted), hit[:, None])
        gradient.mul_(torch.where(counted, outer, 0)[:, None])
        return gradient if slope is None else gradient.mul_(slope)


def softmax_dtype(logits_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the softmax over logits of a dtype: fp64 for fp64, else fp32."""
    return torch.promote_types(logits_dtype, torch.float32)


def reduced(losses: Tensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Reduce losses of shape (tokens,) by `reduction`, with the same gradients as torch's cross entropy."""
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        return losses.sum() / (labels != ignore_index).sum()
    raise ValueError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")


def check_labels(labels: Tensor, shape: torch.Size, what: str, *, hint: str) -> None:
    """Check that labels are integers of the tokens' `shape`; `what` names the argument with the tokens."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise TypeError(f"labels have the dtype {labels.dtype}: must be indices of words, such as torch.long")
    if labels.shape != shape:
        raise ValueError(
            f"labels have the shape {tuple(labels.shape)}, and the tokens of {what} {tuple(shape)}: they must be "
            f"equal; {hint}"
        )


def refuse_parts(tensor: Tensor, name: str, what_to_do: str) -> None:
    """Raise TypeError for a DTensor, since this rank may hold only a part of it."""
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, of which each rank may hold a part: {what_to_do}"
        )


def refuse_second_order() -> None:
    """Refuse a backward with create_graph=True, because its gradients would silently have no gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the loss by chunks has no gradients of gradients (create_graph=True): compute all logits for it, as in "
            "torch.nn.functional.cross_entropy(logits.float(), labels)"
        )


def _places(labels: Tensor, counted: Tensor) -> Tensor:
    """Return the labels as a column of indices, 0 for ignored tokens."""
    return torch.where(counted, labels, 0).to(torch.int64)[:, None]
