"""Read logged numbers without waiting for their device: start the copy now, and read it a step later."""

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from drivetrain_tracking.values.plain import Plain, are_plain, plain_values

Purpose = TypeVar("Purpose")

IN_ORDER = ("mps", "tpu", "xla")  # kinds that copy in the order of the calls: their numbers are read at once
_MOST_PENDING = 16  # a device that is further behind is waited for, so that nothing grows


class CopiedValues(NamedTuple):
    """Values whose numbers are on their way from a device."""

    values: Mapping[str, Any]  # with tensors on the host in place of those on a device, which the copies fill
    plain: dict[str, Plain]  # the values as plain ones; without a meaning while a copy is under way
    events: tuple[Any, ...]  # one for each device that copies; all are over once the values are there

    def are_ready(self) -> bool:
        """Return whether all numbers are on the host. Never waits."""
        return all(event.query() for event in self.events)

    def read(self) -> dict[str, Plain]:
        """Wait for the numbers, and return plain values."""
        for event in self.events:
            if not event.query():
                event.synchronize()
        return plain_values(self.values) if self.events else self.plain


def copy_values(values: Mapping[str, Any]) -> CopiedValues:
    """Begin to copy scalars from their devices without a wait, in one copy for each device and dtype."""
    found: dict[tuple[Any, Any], list[Any]] = {}
    torch = sys.modules.get("torch")  # without it there is no tensor; this package does not import it
    if torch is not None and not are_plain(values):
        # Without a check for a device, which may take longer than all of the call.
        accelerator = torch.accelerator.current_accelerator()
        kind = "" if accelerator is None or accelerator.type in IN_ORDER else accelerator.type
        for value in _iter_leaves(values) if kind else ():
            if isinstance(value, torch.Tensor) and value.device.type == kind and not value.shape:
                found.setdefault((value.device, value.dtype), []).append(value)
    if torch is None or not found:
        return CopiedValues(values, plain_values(values), ())
    copies: dict[int, Any] = {}
    for (_, dtype), scalars in found.items():
        pinned = torch.empty(len(scalars), dtype=dtype, pin_memory=True)
        pinned.copy_(torch.stack([scalar.detach() for scalar in scalars]), non_blocking=True)
        copies.update((id(scalar), one) for scalar, one in zip(scalars, pinned.unbind(), strict=True))
    events = tuple(
        torch.accelerator.current_stream(device).record_event() for device in {device for device, _ in found}
    )
    on_host = _replace_scalars(values, copies)
    return CopiedValues(on_host, plain_values(on_host), events)


class DeviceValues(Generic[Purpose]):
    """A queue of logged values, which come out in order once their numbers are on the host.

    Values without tensors on a device come out at once, unless earlier ones are still on their way. Not thread-safe.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[Purpose, CopiedValues]] = deque()

    def add(self, copied: CopiedValues, purpose: Purpose) -> list[tuple[Purpose, dict[str, Plain]]]:
        """Add copied values; return the values now on the host, with their purposes, in order."""
        if not copied.events and not self._pending:
            return [(purpose, copied.plain)]
        self._pending.append((purpose, copied))
        ready: list[tuple[Purpose, dict[str, Plain]]] = []
        while self._pending and (self._pending[0][1].are_ready() or len(self._pending) > _MOST_PENDING):
            first, values = self._pending.popleft()
            ready.append((first, values.read()))
        return ready

    def drain(self) -> list[tuple[Purpose, dict[str, Plain]]]:
        """Wait for all values, and return them in order."""
        ready = [(purpose, copied.read()) for purpose, copied in self._pending]
        self._pending.clear()
        return ready


def _iter_leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_leaves(item)
    else:
        yield value


def _replace_scalars(value: Any, copies: Mapping[int, Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _replace_scalars(item, copies) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_scalars(item, copies) for item in value]
    return copies.get(id(value), value)
