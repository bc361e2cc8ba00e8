"""Weights that FSDP2 gathers in 8 bits: their scales at each forward, and their conversion back to plain weights.

A gather without a scale computes the scale by an all-reduce, and is right whatever has written the weight. To save
these all-reduces, all scales are computed together when the root's forward begins, and removed when it ends. A gather
outside the root's forward, as in the forward of a block alone, therefore has no scale. The backward of the root's
forward gathers the same weights, with the same scales until it ends.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from drivetrain_backends.compat import call_after_backward
from drivetrain_backends.fsdp.compat import gather_as, tree_leaves
from drivetrain_backends.fsdp.models.sharded_model import ShardedModel
from drivetrain_backends.state_dict.dtensor import plain_values
from drivetrain_precision import SupportsFp8Gather
from drivetrain_precision.fp8.protocol import gathers_in_fp8


class Fp8Gather:
    """The weights of a sharded model that are gathered in 8 bits.

    `note` records the all-reduce of the scales before it runs. Without `shares_scales`, a gather computes its scale.
    """

    def __init__(self, sharded: ShardedModel, *, note: Callable[[], None], shares_scales: bool) -> None:
        self._note = note
        self._sharded = sharded
        found = [each for each in sharded.module.modules() if gathers_in_fp8(each)]
        self._layers: Sequence[SupportsFp8Gather] = found
        self._shards = [each.weight for each in found]
        self._inside = nn.ModuleList(cast("list[nn.Module]", found))
        root = sharded.module
        self._hooks = (
            # Before FSDP's own hook, which begins to gather: its streams wait for what was computed before.
            [
                root.register_forward_pre_hook(self._begin, prepend=True),
                root.register_forward_hook(self._end, prepend=True, always_call=True),
            ]
            if shares_scales and self._layers
            else []
        )

    def close(self) -> None:
        """Let FSDP gather plain weights from now on. No weight may be gathered at the call."""
        for hook in self._hooks:
            hook.remove()
        shards = set(self._shards)
        for parameter in self._sharded.divided():
            if parameter.sharded_param in shards:
                gather_as(parameter, plain_values)
        self._layers, self._shards, self._inside = [], [], nn.ModuleList()

    def _begin(self, *_: object) -> None:
        self._note()
        self._layers[0].compute_scales(self._inside)

    def _end(self, _model: nn.Module, _inputs: object, output: Any) -> None:
        scales = self._exchange()
        for tensor in tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # Before FSDP's own hook on it, which begins to gather.
                tensor.register_hook(partial(self._begin_backward, scales))

    def _begin_backward(self, scales: Sequence[Tensor | None], _: Tensor) -> None:
        self._exchange(scales)
        call_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._exchange()

    def _exchange(self, scales: Sequence[Tensor | None] | None = None) -> list[Tensor | None]:
        scales = scales or [None] * len(self._layers)
        return [
            layer.exchange_scale(shard, scale)
            for layer, shard, scale in zip(self._layers, self._shards, scales, strict=False)
        ]
