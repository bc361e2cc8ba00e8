"""Memory: what a peak of known size looks like to each way of measuring, and what sampling costs.

    uv run --group bench python benchmarks/memory.py

The pattern takes 500 MB for 5 ms. Accelerate's tracker stands in the examples of its repository, and in no package
that installs, so it is left out.
"""

import argparse
import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import psutil
import torch
from rounds import Table, parse_arguments, report, take_turns
from torch import nn

from drivetrain_memory import MemoryTracker, SamplerSettings, record_peak

SPIKE_BYTES, SPIKE_SECONDS = 500_000_000, 0.005
RATES = (1, 10, 100)  # Hz
STEPS = 300  # in one turn: about a second
WATCHED_SECONDS = 4.0
NUM_CHILDREN = 8
NOTE = (
    "Of the peak, the ratio is the part that was seen; taking 500 MB and giving them back takes some 60 ms beside "
    "the 5 ms. Polling is a thread that reads psutil's `memory_info().rss`, as examples do; MemoryTracker reads "
    "children, control group, allocators and, where there are devices, drivers besides. Accelerate's tracker is part "
    "of no package that installs, and is left out."
)


def spike(pages: int) -> None:
    """Take 500 MB, hold them for 5 ms and give them back.

    The pages are there already and only mapped, by calls that do not hold Python's lock: other threads look at any
    moment, as they do where a kernel or a library takes the memory.

    Args:
        pages: The file of the pages.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = libc.mmap(None, SPIKE_BYTES, protection, flags, pages, 0)
    time.sleep(SPIKE_SECONDS)
    libc.munmap(address, SPIKE_BYTES)


def pages_of_spike() -> int:
    """Make the pages, in a file without a name; the file's number."""
    file = os.memfd_create("spike")
    os.posix_fallocate(file, 0, SPIKE_BYTES)
    return file


class Poller:
    """What people write: a thread that asks psutil, and keeps the largest answer."""

    def __init__(self, rate: float) -> None:
        self.most = 0
        self.cpu_seconds = 0.0
        self._interval, self._process = 1 / rate, psutil.Process()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Poller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.most = max(self.most, self._process.memory_info().rss)
            self.cpu_seconds = time.thread_time()
            if self._ended.wait(self._interval):
                return


def seen_by_record(pages: int) -> float:
    """Bytes of the spike that the kernel's counter shows."""
    with record_peak() as peak:
        spike(pages)
    return float(peak.host_bytes - peak.host_before_bytes)


def seen_by_phase(pages: int) -> float:
    """Bytes of the spike that a phase of the tracker shows."""
    with MemoryTracker(None) as tracker:
        with tracker.phase("spike"):
            spike(pages)
    return float(tracker.summary().phases["spike"].host_added_bytes)


def seen_by_polling(pages: int, rate: float) -> float:
    """Bytes of the spike that polling shows; at some moment of its interval, as in a program."""
    before = psutil.Process().memory_info().rss
    with Poller(rate) as poller:
        time.sleep(0.03 + torch.rand(()).item() / rate)
        spike(pages)
    return float(max(1, poller.most - before))


def training_step() -> Callable[[], None]:
    """One step of a small MLP, of some milliseconds."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(128, 256)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(
    step: Callable[[], None], watch: Callable[[], AbstractContextManager[object]]
) -> Callable[[], float]:
    """A turn: seconds of a step while something watches, which is started before it."""

    def turn() -> float:
        with watch():
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            return (time.perf_counter() - begin) / STEPS

    return turn


def cpu_of_tracker(rate: float) -> float:
    """Seconds of processor time that the tracker's thread takes in a second."""
    with MemoryTracker(None, interval_seconds=1 / rate) as tracker:
        time.sleep(WATCHED_SECONDS)
    summary = tracker.summary()
    return summary.sampling_cpu_seconds / summary.seconds


def cpu_of_polling(rate: float) -> float:
    """Seconds of processor time that polling takes in a second."""
    with Poller(rate) as poller:
        time.sleep(WATCHED_SECONDS)
    return poller.cpu_seconds / WATCHED_SECONDS


def cpu_without_pages(rate: float) -> float:
    """The same of the tracker where it never asks for proportional set sizes."""
    settings = SamplerSettings(proportional_seconds=1e6)
    with MemoryTracker(None, interval_seconds=1 / rate, settings=settings) as tracker:
        time.sleep(WATCHED_SECONDS)
    summary = tracker.summary()
    return summary.sampling_cpu_seconds / summary.seconds


@contextmanager
def children(number: int) -> Iterator[None]:
    """Keep processes below this one, as many as workers of a loader, each with memory of its own."""
    source = (
        "import mmap, sys; kept = mmap.mmap(-1, 50_000_000); kept.write(bytes(50_000_000)); sys.stdin.read()"
    )
    with ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE))
        time.sleep(1.0)  # until they have written
        yield


def cpu_with_children(rate: float) -> float:
    """Seconds of processor time that the tracker's thread takes in a second beside eight children."""
    with children(NUM_CHILDREN):
        return cpu_of_tracker(rate)


def tables(arguments: argparse.Namespace) -> Iterator[Table]:
    """Yield every comparison."""
    torch.set_num_threads(1)
    pages = pages_of_spike()
    seen: dict[str, Callable[[], float]] = {
        "taken": lambda: float(SPIKE_BYTES),
        "record_peak": lambda: seen_by_record(pages),
        "a phase of MemoryTracker": lambda: seen_by_phase(pages),
    }
    seen |= {f"psutil polling, {rate} Hz": lambda rate=rate: seen_by_polling(pages, rate) for rate in RATES}
    yield Table(
        title="500 MB for 5 ms: peak that is seen",
        unit="MB",
        measured=take_turns(seen, rounds=arguments.rounds),
    )
    cpu: dict[str, Callable[[], float]] = {}
    for rate in RATES:
        cpu |= {
            f"psutil polling, {rate} Hz": lambda rate=rate: cpu_of_polling(rate),
            f"MemoryTracker, {rate} Hz": lambda rate=rate: cpu_of_tracker(rate),
        }
    cpu[f"MemoryTracker, 10 Hz, {NUM_CHILDREN} children"] = lambda: cpu_with_children(10)
    cpu["MemoryTracker, 10 Hz, no proportional sizes"] = lambda: cpu_without_pages(10)
    yield Table(
        title="Processor time of the thread that samples, in each second",
        unit="ms",
        measured=take_turns(cpu, rounds=max(1, arguments.rounds // 3)),
    )
    step = training_step()
    steps = {"nothing": timed(step, nullcontext)}
    for rate in RATES:
        steps[f"psutil polling, {rate} Hz"] = timed(step, lambda rate=rate: Poller(rate))
        steps[f"MemoryTracker, {rate} Hz"] = timed(
            step, lambda rate=rate: MemoryTracker(None, interval_seconds=1 / rate)
        )
    yield Table(
        title="A training step beside it", unit="us", measured=take_turns(steps, rounds=arguments.rounds)
    )


def main() -> None:
    """Measure everything."""
    arguments = parse_arguments(__doc__, rounds=9)
    report("memory", list(tables(arguments)), arguments, note=NOTE)


if __name__ == "__main__":
    main()
