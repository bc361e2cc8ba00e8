"""Random rounding of fp32 values to bf16: the nearer of the two neighbours is more likely."""

import torch
from torch import Tensor

_LANES = 4  # random numbers of 16 bits in one of 64
_UPPER = -(1 << 16)  # the upper 16 of 32 bits, those that bf16 keeps
_HALF_LANE = 1 << 15
_PIECE = 1 << 17  # the elements that are rounded at a time on the CPU, with all steps in its cache


@torch.no_grad()
def round_stochastically(values: Tensor, generator: torch.Generator, *, out: Tensor | None = None) -> Tensor:
    """Round fp32 values to bf16, into `out` if given. The mean over many roundings equals the value.

    Values that bf16 holds exactly, infinities and NaNs are unchanged. The generator is on the device of the values.
    """
    result = torch.empty_like(values, dtype=torch.bfloat16) if out is None else out
    if not values.is_contiguous() or not result.is_contiguous():
        return result.copy_(round_stochastically(values.contiguous(), generator))
    size = _PIECE if values.device.type == "cpu" else max(1, values.numel())
    for piece, rounded in zip(values.view(-1).split(size), result.view(-1).split(size), strict=True):
        drawn = torch.empty(-(-piece.numel() // _LANES), dtype=torch.int64, device=piece.device)
        drawn.random_(-(2**63), None, generator=generator)
        # As int16 the numbers lie between -2**15 and 2**15 - 1. What a sum carries into the upper bits rounds away
        # from zero, with the probability that the lower bits are of the distance; the lower bits are then cleared.
        # In int32 before the sum: on the CPU a sum of two dtypes takes 30 times as long.
        bits = drawn.view(torch.int16)[: piece.numel()].to(torch.int32)
        bits.add_(_HALF_LANE).add_(piece.view(torch.int32)).bitwise_and_(_UPPER)
        rounded.copy_(bits.view(torch.float32))
        # A NaN's bits may carry into the sign, and so become a zero.
        rounded.masked_fill_(piece.ne(piece), torch.nan)
    return result
