"""What each block of a model does in a forward, measured by one forward without data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import CostError
from drivetrain_dispatch.model.meta_copy import meta_copy
from drivetrain_dispatch.model.sizes import enclosing_modules, named_tensors
from drivetrain_dispatch.model.tensor_subclass import is_packed
from drivetrain_dispatch.planning.block_groups import Cost
from drivetrain_dispatch.planning.blocks import Block
from drivetrain_dispatch.planning.op_recorder import FusedAttention, Recorder, kept_memories, peaks

_BY_HAND = (
    "give what each part does by hand: costs={'layers.0': Cost(seconds=..., peak_bytes=..., kept_bytes=...)}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRate:
    """How fast a device computes.

    Attributes:
        flops_per_second: Floating-point operations in a second, in the dtype of the model.
        bytes_per_second: What it reads and writes of its own memory in a second.
        operation_seconds: What the start of an operation takes, be it as small as may be.
    """

    flops_per_second: float
    bytes_per_second: float
    operation_seconds: float = 5e-6

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("flops_per_second", "bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"ComputeRate: {name}={getattr(self, name)}: must be above 0")
        if not self.operation_seconds >= 0:
            raise ValueError(f"ComputeRate: operation_seconds={self.operation_seconds}: must be 0 or more")


def measure_costs(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    blocks: Sequence[Block],
    rate: ComputeRate,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Cost]:
    """What each block does in one forward, found by running a copy without data on the meta device.

    An operation takes as long as its FLOPs or its bytes do, whichever is longer, and the start of it. What runs
    between two blocks, such as a residual connection, counts to the one before. What the forward leaves is kept, such
    as keys and values, or a table that a module makes; but not what it was given or returns as tensors themselves,
    such as logits. The model and the inputs stay as they are, and neither needs to have data. Autograd is off.

    Args:
        model: The model, on any device, also the meta device. It runs in the mode it is in, training or not.
        args: What its forward takes, in the shapes that are to be planned for. Only shapes and dtypes count.
        kwargs: The same, by name.
        blocks: The parts that are asked about, as `blocks_of` gives them.
        rate: How fast the device computes.
        dtype: What the model's floating-point and complex tensors will be converted to.
        special_dtypes: Dtypes of single tensors by name.

    Returns:
        A cost for every block, by its name; one that never ran has none of anything.

    Raises:
        CostError: The forward depends on data, the model or the inputs cannot be copied, or the model is quantised.
    """
    _check_plain(model)
    try:
        copied, (positional, named) = meta_copy(
            model, (tuple(args), dict(kwargs or {})), dtype=dtype, special_dtypes=special_dtypes
        )
    except (TypeError, RuntimeError, NotImplementedError, ValueError) as error:
        raise CostError(
            f"{type(model).__name__} or its inputs cannot be copied without data ({error}): {_BY_HAND}"
        ) from error
    places = {block.name: index for index, block in enumerate(blocks)}
    owned = ((tensor, _owner(name, places)) for name, tensor in named_tensors(copied))
    recorder = Recorder((tensor, place) for tensor, place in owned if place is not None)
    _watch(copied, places, recorder)
    try:
        with torch.no_grad(), recorder, FusedAttention(recorder):
            result = copied(*positional, **named)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if "meta" not in str(error).lower():
            raise  # as with data
        raise CostError(
            f"{type(model).__name__}: its forward depends on the values of tensors ({str(error).splitlines()[0]}), "
            f"and a forward without data has none: {_BY_HAND}"
        ) from error
    direct = [*_direct_tensors(positional), *_direct_tensors(named), *_direct_tensors(result)]
    return _costs(recorder, recorder.memories_of(direct), [block.name for block in blocks], rate)


def _check_plain(model: nn.Module) -> None:
    if packed := [name for name, tensor in named_tensors(model) if is_packed(tensor)]:
        raise CostError(
            f"{packed[0]!r} is quantised, and computes with data alone: measure the model as it was before; with "
            "special_sizes=quantized_sizes(...) a map is planned for it as it will be"
        )


def _owner(name: str, places: Mapping[str, int]) -> int | None:
    """The block that a tensor belongs to."""
    if name in places:
        return places[name]
    return next((places[outer] for outer in enclosing_modules(name) if outer in places), None)


def _watch(model: nn.Module, places: Mapping[str, int], recorder: Recorder) -> None:
    """Have a recorder know when each block's forward begins and ends."""

    def ended(*_: object) -> None:
        recorder.end()

    watched: set[int] = set()  # a module that stands in several places runs as the first of them
    for name, module in model.named_modules(remove_duplicate=False):
        if name in places and id(module) not in watched:
            watched.add(id(module))
            module.register_forward_pre_hook(_beginning(recorder, places[name]))
            module.register_forward_hook(ended, always_call=True)


def _beginning(recorder: Recorder, block: int) -> Callable[..., None]:
    def begun(*_: object) -> None:
        recorder.begin(block)

    return begun


def _costs(recorder: Recorder, results: set[int], names: Sequence[str], rate: ComputeRate) -> dict[str, Cost]:
    """Costs out of what was recorded."""
    changes = list(recorder.changes)
    first = next(
        (change.block for change in changes if change.block >= 0), 0
    )  # takes what runs before it too
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
        name: Cost(seconds=seconds[place], peak_bytes=peak_bytes[place], kept_bytes=kept_bytes[place])
        for place, name in enumerate(names)
    }


def _direct_tensors(value: object) -> Iterator[Tensor]:
    """The tensors of an output that stand in it themselves, not in a part of it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from (part for part in value if isinstance(part, Tensor))
    elif isinstance(value, Mapping):
        yield from (part for part in value.values() if isinstance(part, Tensor))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (part for field in fields(value) if isinstance(part := getattr(value, field.name), Tensor))
