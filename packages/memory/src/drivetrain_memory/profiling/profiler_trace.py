"""Profile time and memory with torch's profiler, with an optional trace file per rank."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity
from torch.profiler import profile as torch_profile


@contextmanager
def profile(
    directory: Path | str | None = None,
    *,
    rank: int = 0,
    schedule: Callable[[int], ProfilerAction] | None = None,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
    with_flops: bool = False,
    with_modules: bool = False,
) -> Generator[torch_profile]:
    """Profile a block on the CPU and the accelerator by torch's profiler, and optionally write a Chrome trace.

    Open the trace at chrome://tracing or in Perfetto. Without a directory no file is written: query the profiler. Can
    be called on all ranks or on some.

    Args:
        directory: The directory of `trace-rank-RANK.json`, created if it is missing. None writes no file.
        rank: The rank of this process, for the file name.
        schedule: The steps to record, from `torch.profiler.schedule(...)`; call the profiler's `step()` after each
            step. Each cycle writes its own file, `trace-rank-RANK.CYCLE.json`, with cycles counted from 0.
        record_shapes: Whether to record the shapes of operators' inputs.
        profile_memory: Whether to record the memory that operators allocate and free.
        with_stack: Whether to record the Python line that called each operator; slow.
        with_flops: Whether to estimate the floating-point operations of matrix products and convolutions.
        with_modules: Whether to record which module called each operator; torch supports this only for TorchScript.
    """
    place = None if directory is None else Path(directory)
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    cycles = 0

    def write(profiler: torch_profile) -> None:
        nonlocal cycles
        assert place is not None
        name = f"trace-rank-{rank}.json" if schedule is None else f"trace-rank-{rank}.{cycles}.json"
        profiler.export_chrome_trace(str(place / name))
        cycles += 1

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    on_device = [] if accelerator is None or accelerator.type not in kinds else [kinds[accelerator.type]]
    with torch_profile(
        activities=[ProfilerActivity.CPU, *on_device],
        schedule=schedule,
        on_trace_ready=None if place is None else write,
        record_shapes=record_shapes,
        profile_memory=profile_memory,
        with_stack=with_stack,
        with_flops=with_flops,
        with_modules=with_modules,
        acc_events=schedule is None,  # else torch 2.11 warns that events are cleared
    ) as profiler:
        yield profiler
