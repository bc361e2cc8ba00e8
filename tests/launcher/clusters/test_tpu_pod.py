"""Jobs over the hosts of a TPU slice, run for real on this machine by a remote shell that is played."""

import sys
from pathlib import Path

import pytest

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobRequest
from drivetrain_clusters.tpu_pod.cluster import TpuPod

SHELL = str(Path(__file__).with_name("played_remote_shell.sh"))


def ran(folder: Path, source: str, **options: str) -> tuple[int, list[str]]:
    request = JobRequest(
        name="train",
        command=(sys.executable, "-S", "-c", source),
        folder=folder,
        log_dir=folder / "logs",
        environment={"SAID": "it's $HOME"},
        options={"hosts": "a,b", "remote_shell": SHELL, **options},
    )
    submission = TpuPod().plan(request)
    for path, text in submission.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    written: list[str] = []
    code = TpuPod().follow(TpuPod().submit(submission), submission, written.append)
    return code, sorted("".join(written).splitlines())


def test_each_host_knows_which_it_is_and_has_the_words_and_variables(tmp_path: Path) -> None:
    names = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "SAID")
    source = f"import os; print(*(os.environ[n] for n in {names}), os.getcwd())"
    assert ran(tmp_path, source) == (0, [f"{n} a,b it's $HOME {tmp_path}" for n in range(2)])


def test_a_host_that_fails_ends_the_others_and_the_job_has_its_code(tmp_path: Path) -> None:
    source = "import os, sys, time; sys.exit(7) if os.environ['TPU_WORKER_ID'] == '0' else time.sleep(100)"
    assert ran(tmp_path, source)[0] == 7


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
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, object], words: str) -> None:
    request = JobRequest(**{  # pyright: ignore[reportArgumentType]
        "name": "x", "command": ("true",), "folder": Path(), "options": {"hosts": "a,b"}, **changes,
    })  # fmt: skip
    with pytest.raises(ClusterError, match=words):
        TpuPod().plan(request)


def test_one_host_and_a_pod_of_a_kubernetes_job_are_placed_otherwise() -> None:
    one = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}
    of_kubeflow = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1234"}
    assert TpuPod().placement(one) is None
    assert TpuPod().placement({**one, "TPU_WORKER_HOSTNAMES": "a,b", **of_kubeflow}) is None
