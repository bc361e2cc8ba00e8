"""Scales of weights that FSDP2 gathers in float8: all of them by one all-reduce after a step. Imports torchao.

Without it each layer's gather waits for an all-reduce of its own.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

from drivetrain_precision.compat import drop_weight_scale, weight_version
from drivetrain_precision.fp8.torchao_layers import GatheredFloat8Linear

_HOOK = "fp8_scale_hook"


def compute_weight_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in float8. Called on all ranks, holding their shards.

    A scale holds until its weight is written: a checkpoint that is loaded, an average that is copied in. The next
    forward drops the scales of such weights, and their gathers compute them anew.
    """
    if not any(True for _ in _gathered(model)):
        return
    precompute_float8_dynamic_scale_for_fsdp(model)
    for layer in _gathered(model):
        layer.scaled_version = weight_version(layer.weight)
    if not hasattr(model, _HOOK):
        # Before FSDP's own hook, which begins to gather.
        setattr(model, _HOOK, model.register_forward_pre_hook(_drop_stale_scales, prepend=True))


def _drop_stale_scales(model: nn.Module, _: Any) -> None:
    for layer in _gathered(model):
        if layer.scaled_version != weight_version(layer.weight):
            drop_weight_scale(layer.weight)


def _gathered(model: nn.Module) -> Iterator[GatheredFloat8Linear]:
    """Yield the layers whose weights are gathered in float8 and are divided now."""
    for module in model.modules():
        if isinstance(module, GatheredFloat8Linear) and hasattr(module.weight, "to_local"):
            yield module
