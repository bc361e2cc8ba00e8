"""The processor's cores against the number of ranks, workers and threads that a run starts on this host."""

import os
from dataclasses import dataclass
from pathlib import Path

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckVerdict, DoctorFinding, warning
from drivetrain_launcher.plan.control_groups import read_group_limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorMeasurement:
    """The cores that this process may use.

    Attributes:
        cores: The number of cores of the machine.
        usable: The number that this process is bound to.
        quota: The number of cores' time that its control group may use; None without a limit.
        governors: The governors of the clock rates, each once; empty if the system does not tell.
        load: The number of threads that have wanted to run, over the last minute.
    """

    cores: int
    usable: int
    quota: float | None = None
    governors: tuple[str, ...] = ()
    load: float = 0.0

    @property
    def effective(self) -> float:
        """The number of cores' time that a run gets at most."""
        return self.usable if self.quota is None else min(self.usable, self.quota)


def measure_processors(devices: Path = Path("/sys/devices/system/cpu")) -> ProcessorMeasurement:
    """Read what this process may use of the processor."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    found = {file.read_text().strip() for file in devices.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    return ProcessorMeasurement(
        cores=cores,
        usable=usable,
        quota=read_group_limits().cpus,
        governors=tuple(sorted(found)),
        load=os.getloadavg()[0],
    )


def judge_processors(measured: ProcessorMeasurement, checked: CheckedRun) -> CheckVerdict:
    """Judge the cores for a run."""
    summary = f"{measured.effective:g} of {measured.cores} cores"
    findings = [*_room(measured, checked), *_threads(measured, checked)]
    if "powersave" in measured.governors:
        findings.append(
            warning(
                "the clock rate is governed by 'powersave'",
                why="on many machines cores stay slow for a while each time they wake, which a rank often does",
                mend="cpupower frequency-set -g performance (as root; with the driver intel_pstate in active mode "
                "powersave is as good)",
            )
        )
    if measured.load > 1.5 * measured.cores:
        findings.append(
            warning(
                f"the machine is busy: {measured.load:.1f} threads want to run on {measured.cores} cores",
                why="other programs take time from the ranks, and all ranks wait for the slowest; what the doctor "
                "measures here is too low",
                mend="uptime and top show who; start when they have ended, or elsewhere",
                load=measured.load,
            )
        )
    return CheckVerdict(summary=summary, findings=tuple(findings))


def _room(measured: ProcessorMeasurement, checked: CheckedRun) -> list[DoctorFinding]:
    ranks = checked.processes_per_node
    wanted = ranks * (1 + checked.num_workers)
    if ranks > measured.effective:
        return [
            warning(
                f"{ranks} ranks on {measured.effective:g} cores",
                why="they take turns, and each collective waits for all of them",
                mend=f"{_more(measured)}, or --num-processes {max(1, int(measured.effective)) * checked.num_nodes}",
                cores=measured.effective,
            )
        ]
    if wanted > 2 * measured.effective:
        fits = max(0, int(2 * measured.effective / ranks) - 1)
        return [
            warning(
                f"{wanted} processes (ranks and DataLoader workers) on {measured.effective:g} cores",
                why="workers then slow the ranks and each other",
                mend=f"num_workers={fits} in the DataLoader, or {_more(measured)}",
                cores=measured.effective,
            )
        ]
    return []


def _threads(measured: ProcessorMeasurement, checked: CheckedRun) -> list[DoctorFinding]:
    if (
        measured.quota is None
        or measured.quota >= measured.usable
        or "OMP_NUM_THREADS" in checked.environment
        or checked.processes_per_node > 1  # drivetrain launch then sets one thread
    ):
        return []
    threads = max(1, int(measured.quota))
    return [
        warning(
            f"the control group grants {measured.quota:g} cores' time, but {measured.usable} cores are visible",
            why=f"torch starts {measured.usable} threads, which the kernel then stops for most of each 100 ms",
            mend=f"--threads-per-process {threads}, or export OMP_NUM_THREADS={threads}",
            quota=measured.quota,
        )
    ]


def _more(measured: ProcessorMeasurement) -> str:
    if measured.quota is not None and measured.quota < measured.usable:
        return f"request more (docker run --cpus {measured.usable}, resources.limits.cpu)"
    if measured.usable < measured.cores:
        return "request more (sbatch --cpus-per-task, docker run --cpuset-cpus, taskset)"
    return "a machine with more cores"
