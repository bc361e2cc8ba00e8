"""Environment variables that break or slow runs, which the processes of a run would inherit."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckVerdict, DoctorFinding, error, warning
from drivetrain_doctor.host.interfaces import interface_names

# Variable, the value that harms ("" for any), what it does, what to do.
_HARMFUL = (
    ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for every kernel: training is several times slower", ""),
    ("NCCL_P2P_DISABLE", "1", "GPUs of one host exchange gradients through the host's memory", ""),
    ("NCCL_SHM_DISABLE", "1", "GPUs without peer-to-peer exchange gradients through the network stack", ""),
    ("NCCL_IB_DISABLE", "1", "hosts exchange gradients over TCP, also where they have InfiniBand", ""),
    ("NCCL_DEBUG", "TRACE", "NCCL writes lines for every operation", "export NCCL_DEBUG=WARN"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "torch compares every collective over the store first", ""),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "the host waits for every collective", ""),
    ("NCCL_BLOCKING_WAIT", "", "torch reads TORCH_NCCL_BLOCKING_WAIT; the old name only warns", ""),
    (
        "NCCL_ASYNC_ERROR_HANDLING",
        "",
        "torch reads TORCH_NCCL_ASYNC_ERROR_HANDLING; the old name only warns",
        "",
    ),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "a rank whose peer died waits for ever", ""),
)
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# A Unix socket's path has at most 107 characters, of which Python's own names take some 40.
_LONGEST_TMPDIR = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableMeasurement:
    """The environment, and the facts of this host that it is held against.

    Attributes:
        environment: The variables of a run's processes.
        interfaces: The names of this host's interfaces.
        cores: The number of cores.
        num_gpus: The number of NVIDIA devices of this host, whatever the environment hides; None if unknown.
        unusable_folder: The value of TMPDIR if nothing can be written there.
    """

    environment: Mapping[str, str]
    interfaces: tuple[str, ...]
    cores: int
    num_gpus: int | None = None
    unusable_folder: str | None = None


def measure_variables(checked: CheckedRun, dev: Path = Path("/dev")) -> VariableMeasurement:
    """Collect what the environment is held against."""
    folder = checked.environment.get("TMPDIR")
    is_usable = folder is None or (Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK))
    return VariableMeasurement(
        environment=checked.environment,
        interfaces=interface_names(),
        cores=os.cpu_count() or 1,
        num_gpus=sum(1 for _ in dev.glob("nvidia[0-9]*")) or None,
        unusable_folder=None if is_usable else folder,
    )


def judge_variables(measured: VariableMeasurement, checked: CheckedRun) -> CheckVerdict:
    """Judge the environment for a run."""
    findings = [
        *_interfaces(measured, checked),
        *_threads(measured, checked),
        *_devices(measured, checked),
        *_proxies(measured, checked),
        *_leftovers(measured, checked),
        *_temporary(measured),
    ]
    for name, harm, why, mend in _HARMFUL:
        value = measured.environment.get(name)
        if value is not None and (not harm or value.upper() == harm):
            findings.append(warning(f"{name}={value}", why=why, mend=mend or f"unset {name}"))
    return CheckVerdict(summary=f"{len(measured.environment)} variables", findings=tuple(findings))


def unmatched(value: str, interfaces: tuple[str, ...]) -> bool:
    """Return whether NCCL's list of interfaces leaves none: prefixes, `=` for whole names, `^` for all but these."""
    is_exclusion = value.startswith("^")
    words = value.removeprefix("^")
    is_exact = words.startswith("=")
    names = [word for word in words.removeprefix("=").split(",") if word]
    matched = {
        each
        for each in interfaces
        if any(each == name.partition(":")[0] if is_exact else each.startswith(name) for name in names)
    }
    # Without being named, NCCL never uses the loopback interface on several hosts.
    return not (set(interfaces) - matched - {"lo"} if is_exclusion else matched)


def _interfaces(measured: VariableMeasurement, checked: CheckedRun) -> list[DoctorFinding]:
    there = ", ".join(measured.interfaces)
    findings: list[DoctorFinding] = []
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = measured.environment.get(name, "")
        wrong = [each for each in value.split(",") if each and each not in measured.interfaces]
        is_wrong = unmatched(value, measured.interfaces) if name.startswith("NCCL") else bool(wrong)
        if value and is_wrong:
            used = "the GPUs of a host and of several" if name.startswith("NCCL") else "processes"
            findings.append(
                error(
                    f"{name}={value} names no interface of this host, which has {there}",
                    why=f"the process group of {used} fails to start",
                    mend=f"export {name}=INTERFACE with one of {there}, on this host, or unset it",
                )
            )
        elif checked.num_nodes > 1 and value.removeprefix("=") == "lo":
            findings.append(
                error(
                    f"{name}={value} with {checked.num_nodes} hosts",
                    why="no other host can be reached over the loopback interface",
                    mend=f"export {name}=INTERFACE with the one that leads to the other hosts, of {there}",
                )
            )
    return findings


def _threads(measured: VariableMeasurement, checked: CheckedRun) -> list[DoctorFinding]:
    value = measured.environment.get("OMP_NUM_THREADS")
    if value is None:
        return []
    # A list sets the threads of nested levels; the first one counts.
    first = value.split(",")[0].strip()
    fair = max(1, measured.cores // checked.processes_per_node)
    mend = f"unset OMP_NUM_THREADS, or export OMP_NUM_THREADS={fair}"
    if not first.isdecimal() or int(first) == 0:
        return [
            warning(
                f"OMP_NUM_THREADS={value} is no number of threads",
                why="OpenMP ignores it and starts a thread for each core in each rank",
                mend=mend,
            )
        ]
    total = int(first) * checked.processes_per_node
    if total <= 2 * measured.cores:
        return []
    return [
        warning(
            f"OMP_NUM_THREADS={value} in each of {checked.processes_per_node} ranks, on {measured.cores} cores",
            why=f"{total} threads take turns, and each parallel loop waits for the last of them",
            mend=mend,
            threads=total,
            cores=measured.cores,
        )
    ]


def _devices(measured: VariableMeasurement, checked: CheckedRun) -> list[DoctorFinding]:
    value = measured.environment.get("CUDA_VISIBLE_DEVICES")
    if value is None or measured.num_gpus is None:
        return []
    names = [each.strip() for each in value.split(",")]
    if names[0] in ("", "-1"):
        return [
            warning(
                f"CUDA_VISIBLE_DEVICES={value!r} hides all of this host's {measured.num_gpus} GPUs",
                why="the run trains on the CPU without an error",
                mend="unset CUDA_VISIBLE_DEVICES; inside a job, request GPUs from the cluster",
            )
        ]
    wrong = [each for each in names if each.isdecimal() and int(each) >= measured.num_gpus]
    if wrong or len(set(names)) < len(names):
        what = f"names GPU {wrong[0]}, of {measured.num_gpus}" if wrong else "names a GPU twice"
        return [
            error(
                f"CUDA_VISIBLE_DEVICES={value} {what}",
                why="CUDA shows only the devices before the first wrong one, or none",
                mend="unset CUDA_VISIBLE_DEVICES, or name each GPU once, from 0 (nvidia-smi -L lists them)",
            )
        ]
    if len(names) < checked.processes_per_node:
        return [
            error(
                f"CUDA_VISIBLE_DEVICES={value} shows {len(names)} GPUs to {checked.processes_per_node} ranks",
                why="two ranks on one GPU: NCCL refuses ('Duplicate GPU detected')",
                mend=f"--num-processes {len(names) * checked.num_nodes}, or show more GPUs",
            )
        ]
    return []


def _proxies(measured: VariableMeasurement, checked: CheckedRun) -> list[DoctorFinding]:
    variables = {name.lower(): text for name, text in measured.environment.items()}
    proxies = [name for name in _PROXIES if variables.get(name)]
    excluded = [part.strip().lstrip("*.") for part in variables.get("no_proxy", "").split(",")]
    master = checked.master_addr
    if (
        not proxies
        or checked.num_nodes == 1
        or "" in excluded[1:]
        or variables.get("no_proxy", "").strip() == "*"
    ):
        return []
    if any(part and (master == part or master.endswith(f".{part}")) for part in excluded):
        return []
    return [
        warning(
            f"{', '.join(proxies)} set, and no_proxy does not name {master}",
            why="torch's store does not use a proxy, but what speaks HTTP or gRPC between hosts does (Ray, etcd, "
            "a tracking server), and the proxy cannot reach them",
            mend=f"export no_proxy={','.join(filter(None, [*excluded, master, 'localhost']))} on every host",
        )
    ]


def _leftovers(measured: VariableMeasurement, checked: CheckedRun) -> list[DoctorFinding]:
    """Judge variables of a launcher around this one; inside a cluster's job they may be the cluster's."""
    left = [name for name in _RANKS if name in measured.environment]
    if "RANK" not in left or checked.num_nodes > 1 or checked.processes_per_node > 1:
        return []
    return [
        warning(
            f"{', '.join(f'{name}={measured.environment[name]}' for name in left)} set in the shell",
            why="a run of one process takes itself for a rank of another launcher's run, and waits for its "
            "other ranks",
            mend=f"unset {' '.join(left)}",
        )
    ]


def _temporary(measured: VariableMeasurement) -> list[DoctorFinding]:
    folder = measured.environment.get("TMPDIR", "")
    if measured.unusable_folder is not None:
        return [
            error(
                f"TMPDIR={folder}: nothing can be written there",
                why="the launcher, DataLoader workers and compilers keep files there",
                mend="unset TMPDIR, or create the folder on every host",
            )
        ]
    if len(folder) > _LONGEST_TMPDIR:
        return [
            warning(
                f"TMPDIR has {len(folder)} characters",
                why="the path of a Unix socket may have 107, of which Python's own names take some 40: 'AF_UNIX path "
                "too long' in DataLoader workers and Ray",
                mend="export TMPDIR=/tmp",
            )
        ]
    return []
