"""Limits of files, processes, locked memory and memory, compared with the needs of a run on this host."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_launcher.plan.control_groups import GroupLimits, read_group_limits
from drivetrain_messages import format_size

# A rank opens its libraries, its output and its sockets; with workers also a file for each tensor in flight.
_FILES_OF_A_RANK = 256
_FILES_FOR_WORKERS = 4096
# The host of the store holds about three connections for each rank: its agent's, its own, and the watchdog's.
_CONNECTIONS_PER_RANK = 3
# A rank has its main thread, torch's pools, those of the process group and of the watchdog.
_THREADS_OF_A_RANK = 32
_THREADS_OF_A_WORKER = 4
_LEAST_BYTES_OF_A_PROCESS = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitMeasurement:
    """The limits of this process; None stands for no limit.

    Attributes:
        most_open_files: The most open files to which this user may raise the limit (ulimit -Hn).
        processes: The limit of processes and threads of this user (ulimit -u), which does not bind root.
        running: The number of processes and threads that this user has now.
        address_bytes: The limit of a process's virtual memory (ulimit -v).
        has_infiniband: Whether there is an InfiniBand or RoCE adapter, whose transfers lock memory.
    """

    open_files: int | None
    most_open_files: int | None
    processes: int | None
    running: int = 0
    locked_bytes: int | None = None
    address_bytes: int | None = None
    is_root: bool = False
    has_infiniband: bool = False
    group: GroupLimits = field(default_factory=GroupLimits)


def measure_limits(
    proc: Path = Path("/proc"), infiniband: Path = Path("/sys/class/infiniband")
) -> LimitMeasurement:
    """Read the limits of this process and its user; an OSError says that the system has no limits (not a Unix)."""
    try:
        import resource
    except ImportError:
        raise OSError("this system has no such limits") from None

    def limits(which: int) -> list[int | None]:
        return [None if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(which)]

    open_files, most_open_files = limits(resource.RLIMIT_NOFILE)
    running = 0
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if folder.stat().st_uid == os.geteuid():
                running += sum(1 for _ in (folder / "task").iterdir())
    return LimitMeasurement(
        open_files=open_files,
        most_open_files=most_open_files,
        processes=limits(resource.RLIMIT_NPROC)[0],
        running=running,
        locked_bytes=limits(resource.RLIMIT_MEMLOCK)[0],
        address_bytes=limits(resource.RLIMIT_AS)[0],
        is_root=os.geteuid() == 0,
        has_infiniband=infiniband.is_dir() and any(infiniband.iterdir()),
        group=read_group_limits(),
    )


def judge_limits(measured: LimitMeasurement, checked: CheckedRun) -> CheckReport:
    """Judge the limits for a run."""
    group, limit, most = measured.group, measured.open_files, measured.most_open_files
    parts = [f"{'unlimited' if limit is None else f'up to {limit:,}'} open files"]
    parts += [] if group.pids is None else [f"{group.pids:,} processes and threads in the control group"]
    parts += [] if group.memory_bytes is None else [f"{format_size(group.memory_bytes)} in the control group"]
    report = CheckReport(", ".join(parts))
    connections = _CONNECTIONS_PER_RANK * checked.world_size if checked.hosts_store else checked.world_size
    needed = _FILES_OF_A_RANK + connections
    wanted = max(needed, _FILES_FOR_WORKERS if checked.num_workers else 0)
    if limit is not None and limit < wanted:
        target = max(65536, 2 * wanted)
        repair = f"ulimit -n {target if most is None else min(target, most)}"
        if most is not None and most < wanted:
            repair = f"as root write '* - nofile {target}' into /etc/security/limits.conf, or "
            repair += f"docker run --ulimit nofile={target}"
        judge, why = report.error, f"the store and the ranks need about {needed:,}: 'Too many open files'"
        if limit >= needed:
            judge = report.warning
            why = "DataLoader workers open a file for each tensor that they hand over: 'Too many open files' "
            why += "after a while"
        judge(f"at most {limit:,} open files (ulimit -n)", why=why, repair=repair, limit=limit, needed=wanted)
    _judge_processes_and_memory(report, measured, checked)
    return report


def _judge_processes_and_memory(report: CheckReport, measured: LimitMeasurement, checked: CheckedRun) -> None:
    ranks = checked.processes_per_node
    needed = ranks * (_THREADS_OF_A_RANK + checked.num_workers * _THREADS_OF_A_WORKER)
    group = measured.group
    start = f"{ranks} ranks with {checked.num_workers} workers each start about {needed:,} threads"
    own_limit = None if measured.is_root else measured.processes
    of_group = "in this control group (pids.max)"
    for most, running, where, remedy in (
        (own_limit, measured.running, "for this user (ulimit -u)", "ulimit -u {}"),
        (group.pids, group.used_pids, of_group, "docker run --pids-limit {}; kubelet --pod-max-pids"),
    ):
        if most is not None and most - running < needed:
            report.error(
                f"at most {most:,} processes and threads {where}, and {running:,} run already",
                why=f"{start}: 'Resource temporarily unavailable' or \"can't start new thread\"",
                repair=f"{remedy.format(running + 4 * needed)}; or fewer workers, or OMP_NUM_THREADS=1",
                limit=most,
                needed=needed,
            )
    processes = ranks * (1 + checked.num_workers)
    locked, address = measured.locked_bytes, measured.address_bytes
    free = float("inf") if group.memory_bytes is None else group.memory_bytes - group.used_bytes
    if group.memory_bytes is not None and free < processes * _LEAST_BYTES_OF_A_PROCESS:
        report.warning(
            f"the control group has {format_size(max(free, 0))} free of {format_size(group.memory_bytes)} of memory",
            why=f"{processes} processes (ranks and workers) need at least "
            f"{format_size(_LEAST_BYTES_OF_A_PROCESS)} each; beyond the limit the kernel kills one (exit code 137)",
            repair="request more memory (docker run --memory, sbatch --mem, resources.limits.memory), "
            "or fewer workers",
            free_bytes=free,
        )
    if measured.has_infiniband and locked is not None:
        report.error(
            f"a process may lock {format_size(locked)} of memory (ulimit -l), and this host has InfiniBand",
            why="NCCL registers its buffers with the adapter, and fails with ibv_reg_mr or 'Cannot allocate memory'",
            repair="ulimit -l unlimited; docker run --ulimit memlock=-1; for Slurm LimitMEMLOCK=infinity in "
            "slurmd.service",
            locked_bytes=locked,
        )
    if address is not None and checked.accelerator == "cuda":
        report.error(
            f"a process may reserve {format_size(address)} of virtual memory (ulimit -v)",
            why="CUDA reserves more address space than the host has memory, and fails to start",
            repair="ulimit -v unlimited",
            address_bytes=address,
        )
