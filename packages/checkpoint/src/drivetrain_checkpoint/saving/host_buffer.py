"""Copy tensors to host memory, which later saves reuse, so that training continues while a checkpoint is written."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from threading import Event
from typing import Any

import torch
from torch import Tensor

from drivetrain_checkpoint.compat import version_of
from drivetrain_checkpoint.errors import ChangedWhileCopiedError
from drivetrain_checkpoint.saving.replicas import Replicas
from drivetrain_state.device_traits import traits_of

_ALIGNMENT = 64  # bytes; at least the alignment of any dtype
_SAMPLE = 16  # elements compared per tensor


def on_host(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor with the same values; without a copy if the tensor already is one."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


class HostBuffer:
    """A host memory buffer for copies of tensors; pinned if any of the tensors is on an accelerator.

    The buffer grows to the size of the largest save and is kept: only the first save pays for the allocation.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def stage(
        self, tensors: Sequence[Tensor], later: Collection[int] = (), replicas: Replicas | None = None
    ) -> "tuple[list[Tensor], Overlap | None]":
        """Copy tensors into the buffer, overwriting the copies of the last call; return contiguous CPU tensors.

        The overlap copies the tensors whose indices are in `later`, and sums up the replicas. It is None if there are
        neither.
        """
        copies = self.allocate_like(tensors)
        pairs = list(zip(copies, tensors, strict=True))
        at_once = [pair for index, pair in enumerate(pairs) if index not in later]
        overlapped = [pair for index, pair in enumerate(pairs) if index in later]
        for copy, tensor in at_once:
            copy.copy_(tensor.detach(), non_blocking=_is_accelerated(tensor))
        # The side stream of the overlap waits for the copies that are under way on its device.
        for device in _accelerators(one for _, one in at_once) - _accelerators(one for _, one in overlapped):
            torch.accelerator.synchronize(device)
        return copies, Overlap(overlapped, replicas) if overlapped or replicas is not None else None

    def allocate_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return uninitialized contiguous CPU tensors like the given ones; they reuse the memory of the last call."""
        starts = [0]
        for tensor in tensors:
            size_bytes = tensor.numel() * tensor.element_size()
            starts.append(starts[-1] + -(-size_bytes // _ALIGNMENT) * _ALIGNMENT)
        pin = any(_is_accelerated(tensor) for tensor in tensors)
        if self._memory.numel() < starts[-1] or (pin and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old buffer first, to lower the peak
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
        return [
            self._memory[start : start + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .view(tensor.shape)
            for tensor, start in zip(tensors, starts, strict=False)
        ]


class Overlap:
    """The copies that a thread makes, while training continues, of tensors that only an optimizer step changes.

    The argument `parts` holds pairs of a host tensor and the tensor to copy into it. Tensors on an accelerator are
    copied on a side stream. The thread also sums up the replicas.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]], replicas: Replicas | None = None) -> None:
        self._parts = list(parts)
        self._replicas = replicas
        copied = [tensor for _, tensor in parts]
        self._read = [*copied, *(replicas.tensors if replicas is not None else ())]
        self._versions = [version_of(tensor) for tensor in self._read]
        self._streams = {device: torch.Stream(device) for device in _accelerators(self._read)}
        for device, stream in self._streams.items():  # it starts after the work queued by now
            stream.wait_stream(torch.accelerator.current_stream(device))
        self._samples = [self._on_stream(tensor, _sample) for tensor in copied]
        self._is_over = Event()

    def run(self, on_block: Callable[[], None]) -> None:
        """Make the copies in the writing thread; raise `ChangedWhileCopiedError` if a tensor changed too early."""
        try:
            for copy, tensor in self._parts:
                self._on_stream(tensor, lambda one, copy=copy: copy.copy_(one, non_blocking=True))
                on_block()
            if self._replicas is not None:
                with ExitStack() as streams:
                    for stream in self._streams.values():
                        streams.enter_context(stream)
                    self._replicas.sums()
                on_block()
            for stream in self._streams.values():
                stream.synchronize()
            self._check()
        finally:
            self.give_up()

    def wait(self) -> None:
        """Wait until the tensors are copied, so that training may change them."""
        self._is_over.wait()

    def give_up(self) -> None:
        """Drop the references to the tensors, copied or not, and let `wait` return."""
        self._parts.clear()
        self._read.clear()
        self._samples.clear()
        self._replicas = None
        self._is_over.set()

    def _on_stream(self, tensor: Tensor, act: Callable[[Tensor], Any]) -> Any:
        with self._streams.get(tensor.device) or nullcontext():
            return act(tensor.detach())

    def _check(self) -> None:
        """Check that no tensor changed while it was copied or summed up."""
        changed = [
            tensor
            for tensor, version in zip(self._read, self._versions, strict=True)
            if version_of(tensor) != version
        ] + [
            tensor
            for (copy, tensor), sample in zip(self._parts, self._samples, strict=True)
            if sample is not None and not torch.equal(_bytes(_sample(copy)), _bytes(sample.cpu()))
        ]
        if changed:
            raise ChangedWhileCopiedError(
                f"a tensor of shape {tuple(changed[0].shape)} changed while it was copied for the save, outside "
                "optimizer.step(): staging='overlap' assumes that only steps change weights and optimizer "
                "states. Change them after the next step, call wait_for_save() before, or set staging='copy'"
            )


def _accelerators(tensors: Iterable[Tensor]) -> set[torch.device]:
    """Return the accelerators that hold the tensors."""
    return {tensor.device for tensor in tensors if _is_accelerated(tensor)}


def _is_accelerated(tensor: Tensor) -> bool:
    """Return whether a tensor is on the machine's accelerator, and that copies to pinned memory asynchronously."""
    if not traits_of(tensor.device.type).copies_aside:
        return False
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and tensor.device.type == accelerator.type


def _sample(tensor: Tensor) -> Tensor | None:
    """Return a few elements, evenly spaced over a tensor; None if it is empty or cannot be flattened uncopied."""
    if not tensor.is_contiguous() or tensor.numel() == 0:
        return None
    return tensor.view(-1)[:: -(-tensor.numel() // _SAMPLE)].clone()


def _bytes(sample: Tensor | None) -> Tensor:
    """Return the bytes of a sample. NaNs compare as equal in this form."""
    assert sample is not None
    return sample.contiguous().view(torch.uint8)
