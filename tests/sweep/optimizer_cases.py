"""Optimizers that nobody here wrote: torch's, and those of transformers, bitsandbytes and torchao."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def optimizer_cases() -> dict[str, Make]:
    """Return every optimizer by its name, with options that exercise its state."""
    optim = torch.optim
    cases: dict[str, Make] = {
        "SGD": lambda p: optim.SGD(p, lr=0.05),
        "SGD nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        "Adam": lambda p: optim.Adam(p, lr=0.01),
        "Adam amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
        "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
        "AdamW foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
        "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
        "Adamax": lambda p: optim.Adamax(p, lr=0.01),
        "NAdam": lambda p: optim.NAdam(p, lr=0.01),
        "RAdam": lambda p: optim.RAdam(p, lr=0.05),
        "Adagrad": lambda p: optim.Adagrad(p, lr=0.05),
        "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
        "RMSprop centered": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
        "Rprop": lambda p: optim.Rprop(p, lr=0.01),
        "ASGD": lambda p: optim.ASGD(p, lr=0.05, t0=1),
        "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
        "Muon": lambda p: optim.Muon([one for one in p if one.ndim == 2], lr=0.01),
        "transformers Adafactor": _transformers_adafactor,
        "bitsandbytes AdamW8bit": _bitsandbytes,
        "torchao AdamW8bit": _torchao,
        "two groups": _two_groups,
    }
    return cases


def _two_groups(parameters: Iterable[nn.Parameter]) -> Optimizer:
    listed = list(parameters)
    decayed, others = [p for p in listed if p.ndim > 1], [p for p in listed if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.01)


def _transformers_adafactor(parameters: Iterable[nn.Parameter]) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=0.01, relative_step=False, scale_parameter=True)


def _bitsandbytes(parameters: Iterable[nn.Parameter]) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=0.01, min_8bit_size=64)


def _torchao(parameters: Iterable[nn.Parameter]) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=0.01)
