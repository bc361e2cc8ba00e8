"""Megatron-Core on the CPU, for tests alone: what it takes from CUDA by name is given by the host."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class HostInsteadOfCuda(TorchFunctionMode):
    """Tensors that a function would create on CUDA are created on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class _Stream:
    """A stream on which nothing waits."""

    cuda_stream = 0

    def __init__(self, *args: object, **options: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> "_Stream":
        return self


def _causal_mask(size: int) -> torch.Tensor:
    return torch.ones(size, size).triu(diagonal=1).bool()


@contextmanager
def megatron_on_cpu() -> Generator[None]:
    """Run Megatron's layers, models and schedules on the host in the block.

    Regions with random numbers of their own are not told apart: that tracker keeps states of CUDA alone.
    """
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.moe import moe_utils

    stands_in: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "Stream": _Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda *args: _Stream(),
        "synchronize": lambda *args: None,
    }
    with (
        mock.patch.multiple(torch.cuda, **stands_in),
        mock.patch.multiple(torch.cuda.nvtx, range_push=lambda text: None, range_pop=lambda: None),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        mock.patch.object(torch.Tensor, "record_stream", return_value=None),
        mock.patch.object(nn.Module, "cuda", lambda module, *args: module),
        # Megatron-Core 0.16.1 asks for this name of Transformer Engine, which it leaves out if that is missing.
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        # What a block that is computed again begins with, beside the host's own state.
        mock.patch.object(megatron_random, "_get_cuda_rng_state", return_value=None),
        mock.patch.object(megatron_random, "_set_cuda_rng_state"),
        # The backward that computes a block again leaves modes of functions out.
        mock.patch.object(fused_softmax, "get_default_causal_mask", _causal_mask),
        HostInsteadOfCuda(),
    ):
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        try:
            yield
        finally:
            initialize_rng_tracker(force_reset=True)
