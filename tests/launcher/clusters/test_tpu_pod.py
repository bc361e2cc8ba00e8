"""Jobs over the hosts of a TPU slice, run for real on this machine by a remote shell that is played."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.jobs.record import write_private
from drivetrain_clusters.protocol import JobRequest, Submission
from drivetrain_clusters.tpu_pod.cluster import TOPOLOGY, TpuPod

WIRED = {TOPOLOGY: "2,4,1"}
SHELL = str(Path(__file__).with_name("played_remote_shell.sh"))


def planned(folder: Path, source: str) -> Submission:
    request = JobRequest(
        name="train",
        command=(sys.executable, "-S", "-c", source),
        folder=folder,
        log_dir=folder / "logs",
        environment={"SAID": f"it's $HOME of {folder.name}", **WIRED},
        options={"hosts": "a,b", "remote_shell": SHELL},
    )
    return TpuPod().plan(request)


def ran(folder: Path, source: str) -> tuple[int, list[str]]:
    submission, written = planned(folder, source), list[str]()
    for path, text in submission.files.items():
        write_private(path, text)
    code = TpuPod().follow(TpuPod().submit(submission), submission, written.append)
    return code, sorted("".join(written).splitlines())


def test_each_host_knows_which_it_is_and_has_the_words_and_variables(tmp_path: Path) -> None:
    names = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "SAID")
    source = f"import os; print(*(os.environ[n] for n in {names}), os.getcwd())"
    assert ran(tmp_path, source) == (
        0,
        [f"{n} a,b it's $HOME of {tmp_path.name} {tmp_path}" for n in range(2)],
    )


def test_no_value_of_a_variable_stands_on_a_command_line(tmp_path: Path) -> None:
    source = (
        "import glob, os\nfor name in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: words = open(name).read()\n    except (OSError, ValueError): continue\n"
        "    if os.environ['SAID'].partition(' ')[2] in words: print(words)"
    )
    assert ran(tmp_path, source) == (0, [])


def test_where_the_remote_shell_has_ended_the_command_saves_and_has_no_other_input(tmp_path: Path) -> None:
    source = (
        "import signal, sys, time\nassert sys.stdin.read() == ''\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nprint('begins', flush=True)\n"
        "while True: time.sleep(0.1)"  # a signal just before a long sleep would not end it
    )
    _, of_host = planned(tmp_path, source).files.values()
    with subprocess.Popen(
        ["sh", "-s", "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(of_host)
        shell.stdin.flush()
        assert shell.stdout.readline() == "begins\n"
        shell.stdin.close()
        assert shell.wait(timeout=100) == 75


@pytest.mark.slow
def test_a_host_that_fails_ends_the_others_and_the_job_has_its_code(tmp_path: Path) -> None:
    source = "import os, sys, time; sys.exit(7) if os.environ['TPU_WORKER_ID'] == '0' else time.sleep(100)"
    assert ran(tmp_path, source)[0] == 7


@pytest.mark.slow
def test_hosts_that_saved_start_again(tmp_path: Path) -> None:
    source = (
        "import os, sys; name = 'seen' + os.environ['TPU_WORKER_ID']; again = os.path.exists(name)\n"
        "open(name, 'w').close(); print('again' if again else 'first', flush=True); sys.exit(0 if again else 75)"
    )
    assert ran(tmp_path, source) == (0, ["again", "again", "first", "first"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": {}}, r"--option hosts=HOST,HOST"),
        ({"num_nodes": 3}, r"num_nodes=3, but 2 hosts are given"),
        ({"options": {"host": "a"}}, r"no such option.*hosts"),
        ({"options": {"hosts": "a,,b"}}, r"hosts=a,,b: '' must be the name or address of a host"),
        ({"options": {"hosts": "a,-oProxyCommand=x"}}, r"'-oProxyCommand=x' must be the name or address"),
        ({"options": {"hosts": "a,b,a"}}, r"hosts=a,b,a: names a twice; name each host once"),
        ({"environment": {}}, r"2 hosts, and nothing says how .* wired: --env TORCH_TPU_TOPOLOGY=2,4,1"),
        ({"environment": {TOPOLOGY: "banana"}}, r"TOPOLOGY=banana: must be the number of devices along each"),
        ({"environment": {TOPOLOGY: "3,5,7"}}, r"3,5,7: wires 105 devices, but .* 2 or 4 or 8 or 16: say"),
        ({"processes_per_node": 8}, r"2,4,1: wires 8 devices, but the hosts given, 2, have together 16: say"),
        ({"mixed_precision": "fp16"}, r"mixed_precision=fp16: TPUs compute in fp32 and bf16: say bf16, auto"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, object], words: str) -> None:
    request = JobRequest(**{  # pyright: ignore[reportArgumentType]
        "name": "x", "command": ("true",), "folder": Path(), "options": {"hosts": "a,b"}, "environment": WIRED,
        **changes,
    })  # fmt: skip
    with pytest.raises(ClusterError, match=words):
        TpuPod().plan(request)


@pytest.mark.parametrize(
    "changes", [{"device": "cpu", "mixed_precision": "fp16"}, {"options": {"hosts": "a"}}]
)
def test_without_tpus_and_on_one_host_no_wiring_is_asked_for(changes: dict[str, Any]) -> None:
    request = JobRequest(
        name="x", command=("true",), folder=Path(), **{"options": {"hosts": "a,b"}, **changes}
    )
    assert TpuPod().plan(request).files


def test_one_host_and_a_pod_of_a_kubernetes_job_are_placed_otherwise() -> None:
    one = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}
    of_kubeflow = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1234"}
    assert TpuPod().placement(one) is None
    assert TpuPod().placement({**one, "TPU_WORKER_HOSTNAMES": "a,b", **of_kubeflow}) is None
