"""The residency of offloaded tensors: where their values are, and what modules see in their place.

A tensor is in one of four states, by its claims (requests for values that are not used yet) and its users:

| state     | claims | users | transfer | its values are          | next                                        |
|-----------|--------|-------|----------|-------------------------|---------------------------------------------|
| stored    | 0      | 0     | none     | where they are stored   | `request`: requested                        |
| requested | > 0    | 0     | running  | in transfer             | `values`: resident; `cancel` of all: stored |
| resident  | > 0    | 0     | done     | on the computing device | `acquire`: in use; `cancel` of all: stored  |
| in use    | >= 0   | > 0   | done     | there; modules see them | `release` of all: resident, or stored       |

`acquire` waits for a requested tensor first. Only `Residency` changes states, and only the engine calls it, with its
lock held. In-place writes to values in use are copied to the stored tensor at the release.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn

from drivetrain_dispatch.compat import BUFFERS, PARAMETERS, version_of
from drivetrain_dispatch.model.quantized_tensor import lend_state, return_state
from drivetrain_dispatch.offload.parameter import call_plainly
from drivetrain_dispatch.offload.transfer import (
    PendingTransfer,
    TransferEngine,
    TransferRequest,
    TransferWindow,
)


class TensorSlot(NamedTuple):
    """A place in a module that holds a parameter or buffer."""

    module: ref[nn.Module]
    name: str
    is_buffer: bool

    def attributes(self) -> dict[str, Any]:
        """Return the module's `__dict__`; empty once the module is freed."""
        module = self.module()
        return {} if module is None else module.__dict__


class OffloadedTensor:
    """A parameter or buffer whose values are fetched; several units may use it. See the module for its states."""

    __slots__ = (
        "index", "num_claims", "num_users", "quantized", "request", "requested_version", "shown", "slots", "tensor",
        "transfer", "value", "value_version",
    )  # fmt: skip

    def __init__(
        self,
        tensor: Tensor,
        request: TransferRequest,
        slots: Sequence[TensorSlot],
        *,
        quantized: bool = False,
    ) -> None:
        self.tensor = tensor
        self.request = request
        self.slots = slots
        self.quantized = quantized  # such a weight is fetched for modules only, and nothing is written to it
        self.num_claims = 0  # requests that are neither used nor cancelled yet
        self.num_users = 0
        self.transfer: PendingTransfer | None = None
        self.index = 0  # of the values in the transfer
        self.requested_version = 0  # of the stored tensor, at the request
        self.value: Tensor | None = None
        self.value_version = 0  # of the values, when they were last stored
        self.shown: Tensor | None = None  # what modules see in place of the tensor, while it is in use

    @property
    def version(self) -> int:
        """The count of in-place writes to the stored tensor."""
        return version_of(self.request.stored)

    @property
    def is_stale(self) -> bool:
        """True if the stored tensor was written to since its values were requested."""
        return self.transfer is not None and self.requested_version != self.version

    def show(self, value: Tensor) -> None:
        """Show the values to modules, with a gradient path to the parameter where autograd needs one."""
        shown, tracked = self.shown, torch.is_grad_enabled() and self.tensor.requires_grad
        if shown is not None:
            if shown.grad_fn is not None or not tracked:
                return
            self._restore_slots()
        if tracked:
            shown = call_plainly(_Fetched.apply, self.tensor, [value])
        else:
            # F.linear sums non-contiguous inputs in another order if it is set, even under no_grad (torch 2.15).
            shown = value.detach().requires_grad_() if self.tensor.requires_grad else value
        self.shown = shown
        for slot in self.slots:
            attributes = slot.attributes()
            tensors = attributes.get(BUFFERS if slot.is_buffer else PARAMETERS, {})
            if tensors.get(slot.name) is not self.tensor:
                continue  # the module got another tensor since
            # An attribute hides the parameter of its name. A buffer is replaced: a forward may assign a new one.
            (tensors if slot.is_buffer else attributes)[slot.name] = shown
            if self.quantized:
                lend_state(attributes, shown)

    def hide(self) -> None:
        """Store in-place writes to the values, then show the stored tensor to modules again."""
        self.store_writes()
        self._restore_slots()
        self.value = self.shown = None

    def _restore_slots(self) -> None:
        for slot in self.slots:
            attributes = slot.attributes()
            seen = attributes.get(BUFFERS, {}) if slot.is_buffer else attributes
            if seen.get(slot.name) is not self.shown:
                continue  # the forward assigned another one
            if slot.is_buffer:
                seen[slot.name] = self.tensor
            else:
                del seen[slot.name]
            if self.quantized:
                return_state(attributes)

    def store_writes(self) -> None:
        """Copy in-place writes to the fetched values into the stored tensor."""
        assert self.value is not None
        if (version := version_of(self.value)) != self.value_version and not self.quantized:
            with torch.no_grad():
                self.request.stored.copy_(self.value)
            self.value_version = version


@dataclass(slots=True, kw_only=True)
class OffloadStats:
    """The counts of a model's uses of units, and of the bytes that were fetched for them.

    Attributes:
        num_used: The number of times that a unit was used.
        num_missed: The number of uses before which no transfer of the unit had begun, so that the forward stalled:
            the use was unexpected, or the window had no room.
        bytes_fetched: The total of bytes that were fetched.
    """

    num_used: int = 0
    num_missed: int = 0
    bytes_fetched: int = 0


class Residency:
    """The states of a model's offloaded tensors, and the memory of their values. Callers hold the engine's lock."""

    def __init__(self, window_bytes: Mapping[torch.device, int]) -> None:
        self.stats = OffloadStats()
        self.in_use: dict[OffloadedTensor, None] = {}
        self._transfers = TransferEngine()
        self._windows = {device: TransferWindow(device, most) for device, most in window_bytes.items()}

    def find_in_use(self, tensor: Tensor) -> OffloadedTensor | None:
        """Return the tensor in use that another tensor is an exact view of; None if it is no such view."""
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        memory = tensor.untyped_storage().data_ptr()
        for offloaded in self.in_use:
            value = offloaded.value
            if (
                value is not None
                and not offloaded.quantized
                and value.dtype == tensor.dtype
                and value.untyped_storage().data_ptr() == memory
            ):
                return offloaded
        return None

    def fits(self, tensors: Sequence[OffloadedTensor]) -> bool:
        """Return whether the window of their device has room for tensors."""
        missing = _missing_bytes(tensors)
        return not missing or self._windows[tensors[0].request.device].fits(missing)

    def wait_for_room(self, tensors: Sequence[OffloadedTensor]) -> bool:
        """Wait until there is room for tensors, or only tensors in use are left; return whether this had to wait."""
        missing = _missing_bytes(tensors)
        return missing > 0 and self._windows[tensors[0].request.device].wait_for(missing)

    def request(self, tensors: Sequence[OffloadedTensor]) -> bool:
        """Claim tensors, even without room; return whether a transfer began, as for a tensor that was only stored."""
        missing: list[OffloadedTensor] = []
        for tensor in tensors:
            tensor.num_claims += 1
            if tensor.transfer is None:
                missing.append(tensor)
        if not missing:
            return False
        try:
            transfer = self._transfers.start([tensor.request for tensor in missing])
        except BaseException:
            self.cancel(tensors)
            raise
        for index, tensor in enumerate(missing):
            tensor.transfer, tensor.index = transfer, index
            tensor.requested_version = tensor.version
            self._windows[tensor.request.device].reserve(tensor.request.device_bytes)
            self.stats.bytes_fetched += tensor.request.size_bytes
        return True

    def cancel(self, tensors: Sequence[OffloadedTensor]) -> None:
        """Give up the claims on tensors that are not used after all."""
        for tensor in tensors:
            tensor.num_claims -= 1
        self._drop_unclaimed(tensors)

    def values(self, tensor: OffloadedTensor) -> Tensor:
        """Return the values of a claimed tensor, once they have arrived."""
        assert tensor.transfer is not None
        return tensor.transfer.wait()[tensor.index]

    def acquire(self, tensors: Sequence[OffloadedTensor]) -> None:
        """Turn the claims on tensors into uses, whose values modules see. On an error, drop the claims."""
        num_acquired = 0
        try:
            for tensor in tensors:
                value = self.values(tensor)
                if tensor.num_users == 0:
                    tensor.value, tensor.value_version = value, version_of(value)
                    self.in_use[tensor] = None
                else:
                    tensor.store_writes()  # so that what autograd saves from now on counts as unchanged
                tensor.show(value)
                tensor.num_users += 1
                tensor.num_claims -= 1
                num_acquired += 1
        except BaseException:
            self.release(tensors[:num_acquired])
            self.cancel(tensors[num_acquired:])
            raise

    def release(self, tensors: Sequence[OffloadedTensor]) -> None:
        """End a use of tensors. Without another use of a tensor, modules see the stored tensor again."""
        for tensor in tensors:
            tensor.num_users -= 1
            if tensor.num_users == 0:
                del self.in_use[tensor]
                tensor.hide()
        self._drop_unclaimed(tensors)

    def close(self) -> None:
        """End the background thread."""
        self._transfers.close()

    def _drop_unclaimed(self, tensors: Sequence[OffloadedTensor]) -> None:
        """Drop the values of tensors without claims and users, and release their memory."""
        released: _ReleasedBytes = {}
        for tensor in tensors:
            transfer = tensor.transfer
            if transfer is not None and not tensor.num_claims and not tensor.num_users:
                tensor.transfer = None
                key = (tensor.request.device, None if transfer.is_over else transfer)
                released[key] = released.get(key, 0) + tensor.request.device_bytes
        transfer = None  # this name would keep the values of the last tensor
        # After all references to the values are gone: an accelerator's window records an event for their memory.
        for (device, pending), size_bytes in released.items():
            self._windows[device].release(size_bytes, None if pending is None else pending.completion())


def default_windows(
    names: Sequence[str], units: Sequence[Sequence[OffloadedTensor]]
) -> dict[torch.device, int]:
    """Return each device's default window in bytes: the largest sum of three consecutive units. Pure."""
    windows: dict[torch.device, int] = {}
    for device in dict.fromkeys(unit[0].request.device for unit in units):
        sizes = [
            (name, sum(tensor.request.device_bytes for tensor in unit))
            for name, unit in zip(names, units, strict=True)
            if unit[0].request.device == device
        ]
        enclosing: list[tuple[str, int]] = []
        for index, (name, size_bytes) in enumerate(sizes):
            while enclosing and not name.startswith(enclosing[-1][0]):
                enclosing.pop()
            # Units that enclose the first of the three are in use with it.
            held = sum(size for _, size in enclosing) + sum(size for _, size in sizes[index : index + 3])
            windows[device] = max(windows.get(device, 0), held)
            enclosing.append((f"{name}." if name else "", size_bytes))
    return windows


# The bytes that are released, by device and, unless it is over, by transfer.
_ReleasedBytes: TypeAlias = dict[tuple[torch.device, PendingTransfer | None], int]


def _missing_bytes(tensors: Sequence[OffloadedTensor]) -> int:
    return sum([tensor.request.device_bytes for tensor in tensors if tensor.transfer is None])


class _Fetched(torch.autograd.Function):
    """A function from a parameter to its fetched values; the gradient moves to the parameter's device."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, values: list[Tensor]) -> Tensor:
        ctx.device, ctx.dtype = parameter.device, parameter.dtype
        return values[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.dtype.itemsize < gradients[0].dtype.itemsize:
            warnings.warn(
                f"a weight that is stored in {ctx.dtype} and computed in {gradients[0].dtype} is trained, in "
                f"{ctx.dtype}: small steps are lost; store what is trained in {gradients[0].dtype}",
                stacklevel=2,
            )
        return gradients[0].to(ctx.device, ctx.dtype), None
