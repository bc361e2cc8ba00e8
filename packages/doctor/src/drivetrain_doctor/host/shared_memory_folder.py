"""Shared memory: room in /dev/shm for the batches that DataLoader workers hand over, and for NCCL's buffers."""

import os
from dataclasses import dataclass
from pathlib import Path

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_messages import format_size

# What a DataLoader prefetches for each worker, its default; one more batch is being used.
_PREFETCH = 2
# NCCL takes up to some ten MiB for each pair of local ranks whose GPUs have no peer-to-peer.
_NCCL_BYTES_PER_RANK = 32 << 20
# Docker's default is 64 MiB, on which images of a usual batch already fail.
_USUAL_BYTES = 1 << 30
_REPAIR = (
    "docker run --shm-size={size} (or --ipc=host); Kubernetes: an emptyDir in memory at /dev/shm; as root"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryMeasurement:
    """The folder of shared memory; the size is None if the folder does not exist."""

    folder: Path
    size_bytes: int | None = None
    free_bytes: int = 0
    is_writable: bool = True


def measure_shared_memory(folder: Path = Path("/dev/shm")) -> SharedMemoryMeasurement:
    """Measure the folder of shared memory."""
    if not folder.is_dir():
        return SharedMemoryMeasurement(folder=folder)
    found = os.statvfs(folder)
    return SharedMemoryMeasurement(
        folder=folder,
        size_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        is_writable=os.access(folder, os.W_OK | os.X_OK),
    )


def needed_bytes(checked: CheckedRun) -> int:
    """Return the shared memory that this host's processes fill at once, without batches of unknown size."""
    nccl = checked.processes_per_node * _NCCL_BYTES_PER_RANK if checked.accelerator == "cuda" else 0
    batches = checked.num_workers * _PREFETCH + 1 if checked.num_workers else 0
    return checked.processes_per_node * batches * (checked.batch_bytes or 0) + nccl


def judge_shared_memory(measured: SharedMemoryMeasurement, checked: CheckedRun) -> CheckReport:
    """Judge the shared memory for a run."""
    if not checked.num_workers and checked.accelerator != "cuda":
        return CheckReport(
            "the run has neither DataLoader workers nor GPUs, which use it (--num-workers 0)", is_skipped=True
        )
    folder, size = measured.folder, measured.size_bytes
    if size is None or not measured.is_writable:
        report = CheckReport(f"{folder}")
        report.error(
            f"{folder} does not exist" if size is None else f"this user cannot write into {folder}",
            why="DataLoader workers pass batches through it, and fail without it",
            repair=f"mount -t tmpfs -o size=8g,mode=1777 tmpfs {folder}",
        )
        return report
    needed, free = needed_bytes(checked), measured.free_bytes
    report = CheckReport(f"{format_size(free)} of {format_size(size)} free in {folder}")
    target = f"{max(8, -(-2 * needed // 2**30))}g"
    repair = f"{_REPAIR.format(size=target)} mount -o remount,size={target} {folder}; or fewer workers"
    ranks = checked.processes_per_node
    what = f"{folder} has {format_size(free)} free of {format_size(size)}"
    batches = f"{ranks} ranks x {checked.num_workers} workers x {_PREFETCH} prefetched batches"
    if needed > free:
        report.error(
            f"{what}, and this run needs {format_size(needed)}",
            why=f"{batches} and the one in use, at {format_size(checked.batch_bytes or 0)} a batch: a worker dies of "
            "a bus error ('insufficient shared memory')",
            repair=repair,
            free_bytes=free,
            needed_bytes=needed,
        )
    elif checked.batch_bytes is None and free < min(_USUAL_BYTES, ranks * _USUAL_BYTES // 4):
        share = free / max(1, ranks * (checked.num_workers * _PREFETCH + 1))
        report.warning(
            what + (", Docker's default" if size == 64 << 20 else ""),
            why=f"{batches} must fit: with a batch above {format_size(share)}, a worker dies of a bus error; "
            "--batch-megabytes N checks the size of your batch",
            repair=repair,
            free_bytes=free,
        )
    return report
