"""Copies of tensors in host memory that is used again at the next save, so that training may go on at once."""

from collections.abc import Callable, Collection, Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor

from drivetrain_checkpoint.errors import ChangedWhileCopiedError

_ALIGNMENT = 64  # bytes: of no dtype's alignment less
_SAMPLE = 16  # elements of a tensor that are compared


def on_host(tensor: Tensor) -> Tensor:
    """A contiguous tensor on the CPU of the same values: itself where it is one already."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


class HostBuffer:
    """Memory for copies of tensors; pinned where they come from an accelerator.

    It grows to the largest save and stays: the first save pays for the pages, later ones only for the copy.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def size_bytes(self) -> int:
        """Of the memory."""
        return self._memory.numel()

    def stage(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors; what the last call gave is overwritten. Changes to the originals do not show any more.

        Returns:
            Contiguous tensors on the CPU.
        """
        copies = self.make_room(tensors)
        copy_all(list(zip(copies, tensors, strict=True)))
        return copies

    def make_room(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous tensors on the CPU like the given ones, without values; the last call's are reused."""
        starts = [0]
        for tensor in tensors:
            size_bytes = tensor.numel() * tensor.element_size()
            starts.append(starts[-1] + -(-size_bytes // _ALIGNMENT) * _ALIGNMENT)
        pin = any(_is_accelerated(tensor) for tensor in tensors)
        if self._memory.numel() < starts[-1] or (pin and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # first give back, then take
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
        return [
            self._memory[start : start + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .view(tensor.shape)
            for tensor, start in zip(tensors, starts, strict=False)
        ]


def copy_all(parts: Sequence[tuple[Tensor, Tensor]], *, awaited_later: Collection[torch.device] = ()) -> None:
    """Copy tensors to the host, and wait until they are there.

    Args:
        parts: Room on the host, and what is copied there.
        awaited_later: The devices that are not waited for: an `Overlap` made after this call waits for them.
    """
    for copy, tensor in parts:
        copy.copy_(tensor.detach(), non_blocking=_is_accelerated(tensor))
    for device in {tensor.device for _, tensor in parts if _is_accelerated(tensor)}.difference(awaited_later):
        torch.accelerator.synchronize(device)


class Overlap:
    """Copies that a thread makes while training goes on, of tensors that only an optimizer's step changes.

    An accelerator makes the copies of its tensors on a stream beside the one it computes on.

    Args:
        parts: Room on the host, and what is copied there.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._parts = list(parts)
        tensors = [tensor for _, tensor in parts]
        self._versions = [_version(tensor) for tensor in tensors]
        self._streams = {
            device: _Beside(device)
            for device in {tensor.device for tensor in tensors if _is_accelerated(tensor)}
        }
        self._samples = [self._on_stream(tensor, _sample) for tensor in tensors]
        self._is_over = Event()

    def run(self, on_block: Callable[[], None]) -> None:
        """Make the copies. Called by the thread that writes them; `wait` returns when this is over, also by an error.

        Raises:
            ChangedWhileCopiedError: A tensor was changed in the meantime.
        """
        try:
            for copy, tensor in self._parts:
                self._on_stream(tensor, lambda one, copy=copy: copy.copy_(one, non_blocking=True))
                on_block()
            for stream in self._streams.values():
                stream.synchronise()
            self._check()
        finally:
            self.give_up()

    def wait(self) -> None:
        """Wait until the tensors may change again."""
        self._is_over.wait()

    def give_up(self) -> None:
        """Let go of the tensors, whether or not they were copied."""
        self._parts.clear()
        self._samples.clear()
        self._is_over.set()

    def _on_stream(self, tensor: Tensor, act: Callable[[Tensor], Any]) -> Any:
        stream = self._streams.get(tensor.device)
        if stream is None:
            return act(tensor.detach())
        with stream.stream:
            return act(tensor.detach())

    def _check(self) -> None:
        """Refuse copies of tensors that changed.

        Raises:
            ChangedWhileCopiedError: One did: by its version, or by a sample of its elements.
        """
        for (copy, tensor), version, sample in zip(self._parts, self._versions, self._samples, strict=True):
            changed = _version(tensor) != version
            if not changed and sample is not None:
                changed = not torch.equal(_bytes(_sample(copy)), _bytes(sample.cpu()))
            if changed:
                raise ChangedWhileCopiedError(
                    f"a tensor of shape {tuple(tensor.shape)} changed while it was copied for the save, outside "
                    "optimizer.step(): staging='overlap' takes it that only steps change weights and optimizer "
                    "states. Change them after the next step, call wait_for_save() before, or say staging='copy'"
                )


class _Beside:
    """A stream beside the one that an accelerator computes on, which begins where that one is now."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)
        self.stream.wait_stream(torch.accelerator.current_stream(device))

    def synchronise(self) -> None:
        """Wait until its work is done."""
        self.stream.synchronize()


def _is_accelerated(tensor: Tensor) -> bool:
    """Whether a tensor is on the machine's accelerator, which copies from and to pinned memory by itself."""
    if tensor.device.type == "cpu":
        return False
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and tensor.device.type == accelerator.type


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return -1 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor | None:
    """A few elements of a tensor, from all over it; None where that would copy it whole."""
    if not tensor.is_contiguous() or tensor.numel() == 0:
        return None
    return tensor.view(-1)[:: -(-tensor.numel() // _SAMPLE)].clone()


def _bytes(sample: Tensor | None) -> Tensor:
    """The bytes of a sample, as which NaNs are equal."""
    assert sample is not None
    return sample.contiguous().view(torch.uint8)
