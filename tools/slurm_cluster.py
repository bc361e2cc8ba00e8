"""Start a Slurm cluster of several nodes on this machine, run a command in it, and stop it.

python tools/slurm_cluster.py [--nodes 3] [COMMAND...]

It needs Debian's slurm-wlm, and no other right than to run it: all files are in a folder that is removed at the end,
all daemons listen on loopback, and nothing outside is changed. The nodes are 127.0.0.2, 127.0.0.3 and so on, names
that resolve anywhere. Each has four cores and two accelerators that are files, so that Slurm binds tasks to them.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
_SECONDS = 60.0  # for the daemons to answer: a loaded machine starts them slowly
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where Debian puts daemons

_CONF = """\
ClusterName=loopback
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A job that was put back into the queue starts again after cred_expire.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
"""
_NODE = "NodeName={name} NodeAddr={name} NodeHostname=localhost Port={port} CPUs=4 Gres=gpu:2\n"
_PARTITIONS = """\
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """A cluster that runs.

    Attributes:
        folder: The folder of its files and logs.
        nodes: The names of its nodes.
        variables: The variables that its commands need.
    """

    folder: Path
    nodes: tuple[str, ...]
    variables: Mapping[str, str]


def missing_commands() -> list[str]:
    """Return the commands of slurm-wlm that are not installed."""
    return [name for name in DAEMONS if shutil.which(name, path=_PATH) is None]


@contextmanager
def slurm_cluster(*, num_nodes: int = 3) -> Generator[SlurmCluster]:
    """Start a cluster, and stop it with all its jobs at the end.

    Raises:
        RuntimeError: A daemon did not start; the message holds the end of its log.
    """
    # The path of a socket has at most 107 characters: no folder of a test is that short.
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True))
        )
        names = tuple(f"127.0.0.{number}" for number in range(2, 2 + num_nodes))
        _write_files(folder, names)
        variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
        cluster = SlurmCluster(folder=folder, nodes=names, variables=variables)
        _start(stack, cluster, "munged", *_munge_options(folder))
        _wait_for(lambda: (folder / "munge.socket").exists(), folder / "munged.out")
        _start(stack, cluster, "slurmctld", "-D")
        for name in names:
            _start(stack, cluster, "slurmd", "-D", "-N", name, log=f"slurmd-{name}")
        _wait_for(lambda: _idle_nodes(cluster) == num_nodes, folder / "slurmctld.out")
        stack.callback(_end_jobs, cluster)
        yield cluster


def _write_files(folder: Path, names: tuple[str, ...]) -> None:
    import getpass

    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "state").mkdir()
    ports = _free_ports(1 + len(names))
    nodes = "".join(_NODE.format(name=name, port=port) for name, port in zip(names, ports[1:], strict=True))
    head = _CONF.format(folder=folder, port=ports[0], user=getpass.getuser())
    (folder / "slurm.conf").write_text(f"{head}{nodes}{_PARTITIONS}")
    for number, device in enumerate(("null", "zero")):  # Slurm takes nothing but devices for accelerators
        (folder / f"nvidia{number}").symlink_to(f"/dev/{device}")
    files = f"File={folder}/nvidia[0-1]"
    (folder / "gres.conf").write_text("".join(f"NodeName={name} Name=gpu {files}\n" for name in names))
    for name in names:
        (folder / f"spool-{name}").mkdir()


def _munge_options(folder: Path) -> tuple[str, ...]:
    files = (("socket", "munge.socket"), ("key-file", "munge.key"), ("pid-file", "munged.pid"))
    logs = (("log-file", "munged.log"), ("seed-file", "munged.seed"))
    return ("--foreground", "--force", *(f"--{option}={folder / name}" for option, name in files + logs))


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(stack: ExitStack, cluster: SlurmCluster, *words: str, log: str = "") -> None:
    output = stack.enter_context((cluster.folder / f"{log or words[0]}.out").open("wb"))
    process = subprocess.Popen(
        words,
        env={**os.environ, **cluster.variables},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    stack.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ask(cluster: SlurmCluster, *words: str) -> str:
    environment = {**os.environ, **cluster.variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else ""


def _idle_nodes(cluster: SlurmCluster) -> int:
    return (
        _ask(cluster, "sinfo", "--noheader", "--Node", "--partition=normal", "--format=%T")
        .split()
        .count("idle")
    )


def _end_jobs(cluster: SlurmCluster) -> None:
    """End all jobs, so that the daemons leave no process behind."""
    for state in ("PENDING", "RUNNING", "SUSPENDED"):
        _ask(cluster, "scancel", f"--state={state}", "--partition=normal")
        _ask(cluster, "scancel", f"--state={state}", "--partition=urgent")
    deadline = time.monotonic() + _SECONDS
    while _ask(cluster, "squeue", "--noheader").strip() and time.monotonic() < deadline:
        time.sleep(0.2)


def _wait_for(condition: "object", log: Path) -> None:
    assert callable(condition)
    deadline = time.monotonic() + _SECONDS
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in log.parent.glob("*.out"))
            raise RuntimeError(f"{log.stem} did not start within {_SECONDS:g} s\n{logs}")
        time.sleep(0.1)


def main() -> int:
    """Run a command, or a shell, with a cluster."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if missing := missing_commands():
        sys.stderr.write(f"not installed: {', '.join(missing)}; apt-get install slurm-wlm\n")
        return 1
    with slurm_cluster(num_nodes=arguments.nodes) as cluster:
        words = arguments.command or [os.environ.get("SHELL", "/bin/sh")]
        return subprocess.run(words, env={**os.environ, **cluster.variables}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
