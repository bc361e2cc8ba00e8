"""Environment variables that break or slow runs, which the processes of a run would inherit."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckReport

# Variable, the value that harms, what it does.
_HARMFUL = (
    ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for every kernel: training is several times slower"),
    ("NCCL_P2P_DISABLE", "1", "GPUs of one host exchange gradients through the host's memory"),
    ("NCCL_SHM_DISABLE", "1", "GPUs without peer-to-peer exchange gradients through the network stack"),
    ("NCCL_IB_DISABLE", "1", "hosts exchange gradients over TCP, also where they have InfiniBand"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "torch first compares each collective between all ranks"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "the host waits for every collective"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "a rank whose peer died waits for ever"),
)
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableMeasurement:
    """The environment, and this host's interfaces, cores and GPUs, including GPUs that the environment hides."""

    environment: Mapping[str, str]
    interfaces: tuple[str, ...]
    cores: int
    num_gpus: int | None = None


def measure_variables(checked: CheckedRun, dev: Path = Path("/dev")) -> VariableMeasurement:
    """Collect the environment and the facts to compare it with."""
    return VariableMeasurement(
        environment=checked.environment,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        cores=os.cpu_count() or 1,
        num_gpus=sum(1 for _ in dev.glob("nvidia[0-9]*")) or None,
    )


def judge_variables(measured: VariableMeasurement, checked: CheckedRun) -> CheckReport:
    """Judge the environment for a run."""
    environment, cores, ranks = measured.environment, measured.cores, checked.processes_per_node
    report = CheckReport(f"{len(environment)} environment variables")
    _judge_interfaces(report, measured, checked)
    # A list sets the threads of nested levels; the first one counts. OpenMP itself warns of what is no number.
    threads = environment.get("OMP_NUM_THREADS", "")
    first = threads.split(",")[0].strip()
    total = int(first) * ranks if first.isdecimal() else 0
    if total > 2 * cores:
        report.warning(
            f"OMP_NUM_THREADS={threads} in each of {ranks} ranks, on {cores} cores",
            why=f"{total} threads take turns, and each parallel loop waits for the last of them",
            repair=f"unset OMP_NUM_THREADS, or export OMP_NUM_THREADS={max(1, cores // ranks)}",
            threads=total,
            cores=cores,
        )
    _judge_devices(report, measured)
    variables = {name.lower(): text for name, text in environment.items()}
    proxies = [name for name in _PROXIES if variables.get(name)]
    no_proxy, master = variables.get("no_proxy", "").strip(), checked.master_addr
    excluded = [part.strip().lstrip("*.") for part in no_proxy.split(",")]
    is_named = any(part and f".{master}".endswith(f".{part}") for part in excluded)
    if checked.num_nodes > 1 and proxies and not (is_named or no_proxy == "*" or "" in excluded[1:]):
        report.warning(
            f"{', '.join(proxies)} set, but no_proxy does not name {master}",
            why="torch's store uses no proxy, but programs that speak HTTP or gRPC between hosts do (Ray, etcd, a "
            "tracking server), and the proxy cannot reach these hosts",
            repair=f"export no_proxy={','.join(filter(None, [*excluded, master, 'localhost']))} on every host",
        )
    # Inside a cluster's job of several processes these may be the cluster's.
    left = [name for name in _RANKS if name in environment]
    if "RANK" in left and checked.world_size == 1:
        report.warning(
            f"{', '.join(f'{name}={environment[name]}' for name in left)} set in the shell",
            why="a run of one process takes itself for a rank of another launcher's run, and waits for that "
            "run's other ranks",
            repair=f"unset {' '.join(left)}",
        )
    for name, harmful, why in _HARMFUL:
        if environment.get(name, "").upper() == harmful:
            report.warning(f"{name}={environment[name]}", why=why, repair=f"unset {name}")
    return report


def unmatched(value: str, interfaces: tuple[str, ...]) -> bool:
    """Return whether NCCL's list of prefixes (`=`: whole names; `^`: all interfaces but these) matches none."""
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


def _judge_interfaces(report: CheckReport, measured: VariableMeasurement, checked: CheckedRun) -> None:
    there = ", ".join(measured.interfaces)
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = measured.environment.get(name, "")
        is_nccl = name.startswith("NCCL")
        unknown = set(filter(None, value.split(","))) - set(measured.interfaces)
        if value and (unmatched(value, measured.interfaces) if is_nccl else unknown):
            report.error(
                f"{name}={value} names no interface of this host, which has {there}",
                why=f"{'NCCL' if is_nccl else 'gloo'} cannot start its process group",
                repair=f"export {name}=INTERFACE with one of {there}, on this host, or unset it",
            )
        elif checked.num_nodes > 1 and value.removeprefix("=") == "lo":
            report.error(
                f"{name}={value} with {checked.num_nodes} hosts",
                why="the loopback interface leads to no other host",
                repair=f"export {name}=INTERFACE with the one that leads to the other hosts, of {there}",
            )


def _judge_devices(report: CheckReport, measured: VariableMeasurement) -> None:
    value, num_gpus = measured.environment.get("CUDA_VISIBLE_DEVICES"), measured.num_gpus
    if value is None or num_gpus is None:
        return
    names = [each.strip() for each in value.split(",")]
    wrong = [each for each in names if each.isdecimal() and int(each) >= num_gpus]
    if names[0] in ("", "-1"):
        report.warning(
            f"CUDA_VISIBLE_DEVICES={value!r} hides all of this host's {num_gpus} GPUs",
            why="the run trains on the CPU without an error",
            repair="unset CUDA_VISIBLE_DEVICES; inside a job, request GPUs from the cluster",
        )
    elif wrong or len(set(names)) < len(names):
        what = f"names GPU {wrong[0]}, of {num_gpus}" if wrong else "names a GPU twice"
        report.error(
            f"CUDA_VISIBLE_DEVICES={value} {what}",
            why="CUDA shows only the devices before the first wrong one, or none",
            repair="unset CUDA_VISIBLE_DEVICES, or name each GPU once, from 0 (nvidia-smi -L lists them)",
        )
