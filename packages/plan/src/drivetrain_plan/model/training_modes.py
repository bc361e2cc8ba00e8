"""The ways to train that an estimate compares: dtypes of weights and computing, trained parameters, optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Parameters = list[nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMode:
    """A way to train."""

    name: str
    about: str
    dtype: torch.dtype | None  # the dtype of the weights; None for that of the configuration
    # The dtype that the forward computes in; None for that of the weights.
    autocast: torch.dtype | None = None
    is_lora: bool = False
    trains: bool = True


MODES = {
    mode.name: mode
    for mode in (
        TrainingMode(
            name="inference", about="forward only, weights in bf16", dtype=torch.bfloat16, trains=False
        ),
        TrainingMode(name="fp32", about="all in fp32", dtype=torch.float32),
        TrainingMode(
            name="mixed",
            about="weights in fp32, computing in bf16",
            dtype=torch.float32,
            autocast=torch.bfloat16,
        ),
        TrainingMode(name="bf16", about="all in bf16, optimizer states too", dtype=torch.bfloat16),
        TrainingMode(
            name="lora", about="frozen weights in bf16, adapters trained", dtype=torch.bfloat16, is_lora=True
        ),
    )
}


def _adamw(**options: Any) -> Callable[[Parameters], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, **options)


# Without an accelerator torch takes the loop over parameters, with one the operations over all of them at once
# (foreach), which hold temporary results of all parameters.
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "adamw": _adamw(foreach=True),
    "adamw-fused": _adamw(fused=True),
    "adamw-loop": _adamw(foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, foreach=False),
}
