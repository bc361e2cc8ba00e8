"""Counts by layer that stay on the device: a pass over values adds to the counts; no step waits for the result."""

from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_precision.compat import unseen_by_modes, values_of_sparse

_ID_BITS = 24  # of an event's number: what it is; the bits above say when it came
_NEVER = 2**63 - 1


class LayerTotals(NamedTuple):
    """The counts of one layer's values, in the layer's own dtype."""

    values: int = 0
    zeros: int = 0
    subnormals: int = 0  # not zero, and smaller than the dtype's smallest normal number
    nonfinite_gradients: int = 0
    nonfinite_activations: int = 0

    def plus(self, other: "LayerTotals") -> "LayerTotals":
        """Return the sums of both counts, such as of two ranks."""
        return LayerTotals(*(a + b for a, b in zip(self, other, strict=True)))


class _DeviceTable(NamedTuple):
    """The counts on one device: (num_layers, 4) by layer, and the number of the first event that is not finite."""

    counts: Tensor
    first: Tensor


class LayerCounts:
    """The counts of some layers, on the device of the values."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._tables: dict[torch.device, _DeviceTable] = {}
        self._num_values = [0] * num_layers
        self.num_events = 0  # the tensors looked at so far

    def add_gradient(self, layer: int, gradient: Tensor, event: int, *, smallest: float | None) -> None:
        """Count a gradient, dense or sparse; `event`, below 2**24, is the event number of a non-finite value in it.

        `smallest` is the smallest normal number of the layer's dtype; None counts no underflow.
        """
        with torch.no_grad(), unseen_by_modes():
            values = _plain(gradient)
            bad = values.isfinite().logical_not_().sum()
            counted = [bad]
            if smallest is not None:
                zeros = (values == 0).sum()
                counted = [zeros, (values.abs() < smallest).sum() - zeros, bad]
            table = self._table(values.device)
            table.counts[layer, 3 - len(counted) : 3].add_(torch.stack(counted))
            self._note(table, bad, event)
        if smallest is not None:
            self._num_values[layer] += values.numel()

    def add_activation(self, layer: int, activation: Tensor, event: int, *, is_input: bool) -> None:
        """Look for non-finite values in an activation; count them if it is an output."""
        with torch.no_grad(), unseen_by_modes():
            values = _plain(activation)
            # Where no gradient flows, negative infinities are the masks of attention.
            flows = activation.requires_grad
            is_bad = values.isfinite().logical_not_() if flows else values.isnan() | (values == torch.inf)
            bad = is_bad.sum()
            table = self._table(values.device)
            if not is_input:
                table.counts[layer, 3].add_(bad)
            self._note(table, bad, event)

    def first_event(self) -> tuple[int, int] | None:
        """Return the time and the number of the first event with a nonfinite value, or None. Synchronises."""
        first = min((int(table.first.item()) for table in self._tables.values()), default=_NEVER)
        return None if first == _NEVER else divmod(first, 2**_ID_BITS)

    def forget_first(self) -> None:
        """Forget the first non-finite value."""
        for table in self._tables.values():
            table.first.fill_(_NEVER)

    def reset(self) -> None:
        """Set all counts to zero."""
        self.forget_first()
        self._num_values = [0] * self._num_layers
        for table in self._tables.values():
            table.counts.zero_()

    def totals(self) -> list[LayerTotals]:
        """Return the counts of each layer. Synchronises with the device."""
        sums = torch.zeros(self._num_layers, 4, dtype=torch.int64)
        for table in self._tables.values():
            sums += table.counts.cpu()
        rows: list[list[int]] = sums.tolist()
        return [LayerTotals(values, *row) for values, row in zip(self._num_values, rows, strict=True)]

    def _note(self, table: _DeviceTable, bad: Tensor, event: int) -> None:
        number = (self.num_events << _ID_BITS) | event
        self.num_events += 1
        torch.minimum(table.first, torch.where(bad > 0, number, _NEVER), out=table.first)

    def _table(self, device: torch.device) -> _DeviceTable:
        if device not in self._tables:
            counts = torch.zeros(self._num_layers, 4, dtype=torch.int64, device=device)
            first = torch.full((), _NEVER, dtype=torch.int64, device=device)
            self._tables[device] = _DeviceTable(counts, first)
        return self._tables[device]


def _plain(tensor: Tensor) -> Tensor:
    """Return the values that this rank holds, as a plain dense tensor of a dtype that can be compared."""
    values = tensor.detach()
    if hasattr(values, "to_local"):  # a DTensor, whose own class is costly to import
        values: Tensor = values.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    if values.is_sparse:
        values = values_of_sparse(values)
    return values.float() if values.element_size() == 1 else values
