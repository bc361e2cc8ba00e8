"""Measure the cost of each block of a model with one forward on the meta device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import CostError
from drivetrain_dispatch.model.meta_init import meta_copy
from drivetrain_dispatch.model.model_layout import ModelLayout, nearest_entry
from drivetrain_dispatch.planning.block_groups import BlockCost
from drivetrain_dispatch.planning.blocks import Block
from drivetrain_dispatch.planning.op_recorder import FusedAttention, OpRecorder, kept_memories, peaks

_BY_HAND = "give costs by hand: costs={'layers.0': BlockCost(seconds=..., peak_bytes=..., kept_bytes=...)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRate:
    """The compute rates of a device."""

    flops_per_second: float
    bytes_per_second: float
    operation_seconds: float = 5e-6


def measure_costs(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    blocks: Sequence[Block],
    rate: ComputeRate,
) -> dict[str, BlockCost]:
    """Measure the cost of each block in one forward, by running a copy of the model on the meta device.

    An operation takes the longer of its compute time and its memory time, plus the launch overhead. Operations
    between two blocks, such as a residual connection, count towards the earlier block. Memory that outlives the
    forward counts as kept: keys and values, or a table that a module builds, but neither inputs nor outputs.
    """
    layout = ModelLayout.of(model)
    if layout.quantized:
        raise CostError(
            f"{min(layout.quantized)!r} is quantised and cannot compute without data: measure the model before it is "
            "quantised, and plan with special_sizes=quantized_sizes(...)"
        )
    try:
        copied, (positional, named) = meta_copy(layout, (tuple(args), dict(kwargs or {})))
    except (TypeError, RuntimeError, NotImplementedError, ValueError) as error:
        raise CostError(
            f"{type(model).__name__} or its inputs cannot be copied without data ({error}): {_BY_HAND}"
        ) from error
    places = {block.name: index for index, block in enumerate(blocks)}
    empty = ModelLayout.of(copied)
    owned = ((tensor, nearest_entry(name, places)) for name, tensor in empty.tensors.items())
    recorder = OpRecorder((tensor, places[owner]) for tensor, owner in owned if owner is not None)
    _watch(empty.modules, places, recorder)
    try:
        with torch.no_grad(), recorder, FusedAttention(recorder):
            result = copied(*positional, **named)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if "meta" not in str(error).lower():
            raise  # the forward would fail with data too
        raise CostError(
            f"{type(model).__name__}: its forward depends on the values of tensors ({str(error).splitlines()[0]}), "
            f"and a forward without data has none: {_BY_HAND}"
        ) from error
    direct = [*_direct_tensors(positional), *_direct_tensors(named), *_direct_tensors(result)]
    return _sum_costs(recorder, recorder.memories_of(direct), [block.name for block in blocks], rate)


def _watch(modules: Mapping[str, nn.Module], places: Mapping[str, int], recorder: OpRecorder) -> None:
    """Register hooks that tell a recorder when each block's forward begins and ends."""
    watched: set[int] = set()  # a module with several names runs under the first of them
    for name, module in modules.items():
        if name in places and id(module) not in watched:
            watched.add(id(module))
            module.register_forward_pre_hook(partial(recorder.begin, places[name]))
            module.register_forward_hook(recorder.end, always_call=True)


def _sum_costs(
    recorder: OpRecorder, results: set[int], names: Sequence[str], rate: ComputeRate
) -> dict[str, BlockCost]:
    """Return the cost of each block from the operations of a recorder."""
    changes = list(recorder.changes)
    # Operations before the first block count towards it.
    first = next((change.block for change in changes if change.block >= 0), 0)
    kept = kept_memories(changes, results)
    seconds, peak_bytes, kept_bytes = [0.0] * len(names), [0] * len(names), [0] * len(names)
    for operation in recorder.operations:
        busy = max(operation.flops / rate.flops_per_second, operation.size_bytes / rate.bytes_per_second)
        seconds[first if operation.block < 0 else operation.block] += busy + rate.operation_seconds
    for block, most in peaks(changes, kept).items():
        place = first if block < 0 else block
        peak_bytes[place] = max(peak_bytes[place], most)
    for change in changes:
        if change.memory in kept:
            kept_bytes[first if change.block < 0 else change.block] += change.size_bytes
    return {
        name: BlockCost(seconds=seconds[place], peak_bytes=peak_bytes[place], kept_bytes=kept_bytes[place])
        for place, name in enumerate(names)
    }


def _direct_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors at the top level of inputs or outputs, not deeper ones."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from (part for part in value if isinstance(part, Tensor))
    elif isinstance(value, Mapping):
        yield from (part for part in value.values() if isinstance(part, Tensor))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (part for field in fields(value) if isinstance(part := getattr(value, field.name), Tensor))
