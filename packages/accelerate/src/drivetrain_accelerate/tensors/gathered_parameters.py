"""Gather parameters that ZeRO divided among ranks."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def GatheredParameters(  # noqa: N802 Accelerate's name
    params: Iterable[torch.Tensor] | torch.Tensor,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Generator[Any]:
    """Run the block with whole parameters, where DeepSpeed's ZeRO stage 3 divided them. Called on all ranks.

    Args:
        params: The parameters; others than those of stage 3 are whole already.
        modifier_rank: The rank whose changes of the values count; None if none are made.
        fwd_module: A module that is called in the block.
        enabled: Whether to gather.
    """
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    if not enabled or not any(hasattr(each, "ds_id") for each in given):  # ZeRO marks what it divides
        yield
        return
    import deepspeed

    zero: Any = deepspeed.zero
    with zero.GatheredParameters(given, modifier_rank=modifier_rank, fwd_module=fwd_module) as gathered:
        yield gathered
