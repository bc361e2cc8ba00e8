"""CUDA as the bodies of tests see it: torch's own accounts of waits, copies and memory."""

import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.cuda import _gpu_trace  # pyright: ignore[reportPrivateUsage]
from torch.profiler import ProfilerActivity, profile

from hardware.devices import Copies

_A_WAIT = "called a synchronizing CUDA operation"


class CudaDevice:
    """An NVIDIA card, or several; see `hardware.devices.Device`."""

    name = "cuda"
    copies_aside = True
    scale = 16

    def prepare(self) -> None:
        """Make the context of the device, so that no test is charged for it."""
        torch.zeros(1, device="cuda")

    def num_devices(self) -> int:
        """How many cards this process sees."""
        return torch.cuda.device_count()

    def collectives(self) -> str:
        """NCCL where each rank has a card of its own; it refuses two ranks on one card, and gloo does not."""
        return f"cpu:gloo,cuda:{'nccl' if self.num_devices() > 1 and dist.is_nccl_available() else 'gloo'}"

    @contextmanager
    def waits(self) -> Generator[list[str]]:
        """Inside, list the operations that torch itself calls synchronizing, and waits for an event or the device.

        In the mode that warns: all are found in one run, where the mode that raises tells the first. It does not see
        `synchronize` of an event or the device; torch's hooks for sanitizers do.
        """
        found: list[str] = []
        thread = get_ident()

        def note(what: str) -> None:
            if get_ident() != thread:  # a thread that waits holds nobody up
                return
            not_ours = (str(Path(torch.__file__).parent), warnings.__file__, __file__)
            frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(not_ours)]
            lines = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
            found.append(" < ".join([what, *reversed(lines[-4:])]))

        def note_warning(message: Any, *_: object, **__: object) -> None:
            if _A_WAIT in str(message):
                note("a synchronizing operation")

        def note_event(_: int) -> None:
            note("an event")

        def note_device() -> None:
            note("the device")

        before = torch.cuda.get_sync_debug_mode()
        torch._C._activate_gpu_trace()  # pyright: ignore[reportPrivateUsage]
        hooks = (
            (_gpu_trace.EventSynchronizationCallbacks.callback_list, note_event),
            (_gpu_trace.DeviceSynchronizationCallbacks.callback_list, note_device),
        )
        for calls, hook in hooks:
            calls.append(hook)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note_warning
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
                for calls, hook in hooks:
                    calls.remove(hook)

    @contextmanager
    def copies(self) -> Generator[Copies]:
        """Inside, count the copies that a trace of the device shows, by the stream that they run on."""
        found = Copies()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            yield found
            torch.cuda.synchronize()
        told = kineto_events(trace)
        found.kept = sum(event.name() == "aten::record_stream" for event in told)
        events = [event for event in told if event.device_type() == DeviceType.CUDA]
        kernels = [event for event in events if not event.name().startswith(("Memcpy", "Memset"))]
        computing = {event.device_resource_id() for event in kernels}
        for event in events:
            if event.name().startswith("Memcpy HtoD (Pinned"):
                found.beside += event.device_resource_id() not in computing
            elif event.name().startswith("Memcpy HtoD"):
                found.pageable += 1
            elif event.name().startswith("Memcpy DtoH") and "Pinned" in event.name():
                found.to_pinned += 1

    def bytes_in_use(self) -> int:
        """The bytes that the allocator has given to tensors."""
        return torch.cuda.memory_allocated()

    @contextmanager
    def limited(self, further_bytes: int) -> Generator[None]:
        """Inside, the allocator may take so many bytes more from the device."""
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + further_bytes) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def kineto_events(trace: profile) -> list[Any]:
    """The events of a trace with the streams that they ran on, which torch's public events do not tell."""
    assert trace.profiler is not None
    results = trace.profiler.kineto_results
    assert results is not None
    return list(results.events())
