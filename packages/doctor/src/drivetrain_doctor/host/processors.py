"""The processor's cores against the number of ranks, workers and threads that a run starts on this host."""

import os
from dataclasses import dataclass

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_launcher.plan.control_groups import read_group_limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorMeasurement:
    """The cores that this process may use.

    Attributes:
        usable: The number of cores that this process is bound to.
        quota: The CPU time, in cores, that the process's control group may use; None without a limit.
        load: The mean number of threads that wanted to run in the last minute.
    """

    cores: int
    usable: int
    quota: float | None = None
    load: float = 0.0

    @property
    def effective(self) -> float:
        """The most CPU time, in cores, that a run gets."""
        return self.usable if self.quota is None else min(self.usable, self.quota)


def measure_processors() -> ProcessorMeasurement:
    """Read the cores and the time that this process may use."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return ProcessorMeasurement(
        cores=cores, usable=usable, quota=read_group_limits().cpus, load=os.getloadavg()[0]
    )


def judge_processors(measured: ProcessorMeasurement, checked: CheckedRun) -> CheckReport:
    """Judge the cores for a run."""
    report = CheckReport(f"{measured.effective:g} of {measured.cores} cores usable")
    ranks, quota = checked.processes_per_node, measured.quota
    cores = "1 core" if measured.effective == 1 else f"{measured.effective:g} cores"
    wanted = ranks * (1 + checked.num_workers)
    more = "use a machine with more cores"
    if quota is not None and quota < measured.usable:
        more = f"request more (docker run --cpus {measured.usable}, resources.limits.cpu)"
    elif measured.usable < measured.cores:
        more = "request more (sbatch --cpus-per-task, docker run --cpuset-cpus, taskset)"
    if ranks > measured.effective:
        report.warning(
            f"{ranks} ranks share {cores}",
            why="ranks that share a core take turns, and each collective waits for all ranks",
            repair=f"{more}, or launch with --num-processes {max(1, int(measured.effective)) * checked.num_nodes}",
            cores=measured.effective,
        )
    elif wanted > 2 * measured.effective:
        fits = max(0, int(2 * measured.effective / ranks) - 1)
        report.warning(
            f"{wanted} processes (ranks and DataLoader workers) share {cores}",
            why="workers slow the ranks and each other",
            repair=f"set num_workers={fits} in the DataLoader, or {more}",
            cores=measured.effective,
        )
    # For several processes, drivetrain launch sets one thread.
    is_chosen = "OMP_NUM_THREADS" in checked.environment or ranks > 1
    if quota is not None and quota < measured.usable and not is_chosen:
        threads = max(1, int(quota))
        report.warning(
            f"the control group allows the time of {quota:g} cores, and torch sees {measured.usable} cores",
            why=f"torch starts {measured.usable} threads, and the kernel stops them for most of each 100 ms",
            repair=f"--threads-per-process {threads}, or export OMP_NUM_THREADS={threads}",
            quota=quota,
        )
    if measured.load > 1.5 * measured.cores:
        report.warning(
            f"the machine is busy: {measured.load:.1f} threads want to run on {measured.cores} cores",
            why="other programs slow the ranks, and all ranks wait for the slowest; they also lower the speeds that "
            "the doctor measures",
            repair="top shows these programs; start the run after they end, or on another machine",
            load=measured.load,
        )
    return report
