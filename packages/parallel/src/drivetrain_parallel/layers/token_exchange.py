"""Tokens go to the ranks that hold their experts, and what the experts return comes back."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from drivetrain_parallel.plan import Cut
from drivetrain_parallel.ranks import TensorRanks, enter, exchange, join

Experts: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def share_tokens(
    apply: Experts, tokens: Tensor, index: Tensor, weights: Tensor, *, ranks: TensorRanks
) -> Tensor:
    """Return what `apply` makes of tokens that all ranks hold alike, each of which computes a part of them.

    So all ranks get the same outputs to the last bit. Called on all ranks; the tensors are those of `apply_experts`.
    """
    given = (enter(tokens, ranks), index, enter(weights, ranks))
    parts = [one.tensor_split(ranks.size) for one in given]
    own = apply(*(each[ranks.rank] for each in parts))
    return join(own, 0, tuple(map(len, parts[0])), ranks)


def apply_experts(
    own: Experts,
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    cut: Cut,
    ranks: TensorRanks,
    num_losses: int,
) -> tuple[Tensor, Tensor]:
    """Return what the experts of all ranks make of this rank's tokens, of which there may be none.

    Called on all ranks. Every choice of every token is computed, however uneven the choices are. The host waits once,
    for the numbers.

    Args:
        own: The experts of this rank, as a function of tokens (rows, width), of the number of an expert among them
            (rows, 1), and of weights (rows, 1).
        tokens: The tokens, of shape (..., width).
        index: The numbers of the experts that each token chooses, of shape (..., choices).
        weights: The weight of each choice, of shape (..., choices).
        cut: The division of the experts, which are its units.
        ranks: The ranks that hold them.
        num_losses: The number of losses of different tokens, whose mean the experts train on.

    Returns:
        For each token the sum of its choices, of the shape and dtype of `tokens`; and the number of this rank's
        choices of each expert, of shape (experts,).

    Raises:
        RuntimeError: An index is that of no expert.
    """
    num_choices, chosen = index.shape[-1], index.reshape(-1).long()
    counts = chosen.new_zeros(cut.num_units).scatter_add_(0, chosen, torch.ones_like(chosen))
    order = chosen.argsort(stable=True)  # by expert, and so by the rank that holds it
    sizes = cut.sizes(ranks.size)
    num_own = sizes[ranks.rank]
    wanted = ranks.exchange(counts, sizes, [num_own] * ranks.size).view(ranks.size, num_own)
    of_ranks = torch.stack([part.sum() for part in counts.split(sizes)])
    sent, received = torch.stack([of_ranks, wanted.sum(1)]).tolist()
    number = sum(received)

    # Gradients are divided where they reach the experts, and multiplied where they leave: those of the experts
    # themselves, which are large, come out as the mean over the losses, and are not copied.
    rows = tokens.reshape(-1, tokens.shape[-1])[order // num_choices]
    rows = exchange(rows, ranks, sent, received, gradient_factor=num_losses)
    experts = torch.arange(num_own, device=index.device).repeat(ranks.size)
    experts = experts.repeat_interleave(wanted.flatten(), output_size=number)
    if not number:
        # A row that nothing depends on: every parameter gets a gradient, which other ranks may wait to average.
        rows = torch.cat(
            [rows, torch.linspace(-1, 1, rows.shape[1], device=rows.device).to(rows.dtype)[None]]
        )
        experts = index.new_zeros(1, dtype=torch.long)
    computed = own(rows, experts[:, None], rows.new_ones(len(rows), 1))[:number]

    returned = exchange(computed, ranks, received, sent, gradient_factor=1 / num_losses)
    by_choice = torch.zeros_like(returned).index_copy(0, order, returned)
    shape = *tokens.shape[:-1], num_choices
    weighted = by_choice.view(*shape, by_choice.shape[-1]) * weights.reshape(*shape, 1)
    return weighted.sum(-2).to(tokens.dtype), counts
