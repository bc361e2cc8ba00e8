"""The real kubectl against a few endpoints of an API server that this test plays."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_clusters import ClusterError
from drivetrain_clusters.kubernetes.cluster import Kubernetes
from played_kubernetes import PlayedCluster, played_kubernetes
from requests_of_jobs import TRAPS, make_request

needs_kubectl = pytest.mark.usefixtures("kubectl")


@pytest.fixture(scope="module")
def kubectl() -> None:
    """Skip without kubectl; what Debian 12 has, 1.20, will do."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl not installed: apt-get install kubernetes-client")


LINE = ("submit", "--on", "kubernetes", "--num-nodes", "2", "--cpu", "--option", "image=x")


@pytest.mark.slow
@needs_kubectl
def test_a_job_is_created_followed_across_a_restart_and_keeps_its_exit_code(
    drivetrain: Callable, script: Callable, tmp_path: Path
) -> None:
    script("print(1)", "train.py")
    cluster = PlayedCluster(exit_codes=((75, 75), (0, 3)))
    with played_kubernetes(cluster, tmp_path / "home") as environment:
        done = drivetrain(*LINE, "train.py", "$(id)", environment=environment)
    assert done.returncode == 3, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(
        2 * [f"[node {rank}] {text}" for rank in (0, 1) for text in ("one", "two")]
    )
    assert "waiting for node 0 (ImagePullBackOff: no such image), node 1" in done.stderr
    assert "job team/train starts again, restart 1" in done.stderr
    assert "job team/train failed: jobset is over" in done.stderr
    made = cluster.created[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert made["containers"][0]["command"][-2:] == ["train.py", "$$(id)"]


@pytest.mark.slow
@needs_kubectl
def test_a_log_whose_connection_broke_goes_on_without_a_line_twice(
    drivetrain: Callable, script: Callable, tmp_path: Path
) -> None:
    script("print(1)", "train.py")
    cluster = PlayedCluster(exit_codes=((0,),), lines=("one", "two", "three"), breaks_first_log=True)
    line = ["1" if word == "2" else word for word in LINE]
    with played_kubernetes(cluster, tmp_path / "home") as environment:
        done = drivetrain(*line, "train.py", environment=environment)
    assert (done.stdout, done.returncode) == ("one\ntwo\nthree\n", 0), done.stderr


@needs_kubectl
@pytest.mark.slow
def test_a_job_is_found_again_and_cancelled(drivetrain: Callable, script: Callable, tmp_path: Path) -> None:
    script("print(1)", "train.py")
    cluster = PlayedCluster()
    with played_kubernetes(cluster, tmp_path / "home") as environment:
        done = drivetrain(*LINE, "--no-follow", "train.py", environment=environment)
        assert (done.stdout, done.returncode) == ("team/train\n", 0), done.stderr
        assert f"drivetrain job follow team/train --log-dir {tmp_path}/logs" in done.stderr
        followed = drivetrain("job", "follow", "team/train", environment=environment)
        assert (followed.stdout.count("[node 1] two\n"), followed.returncode) == (1, 0), followed.stderr
        again = drivetrain(*LINE, "train.py", environment=environment)
        assert (again.returncode, cluster.deleted) == (2, [])
        assert "a job of this name exists; say another --name, or cancel that one first" in again.stderr
        cancelled = drivetrain("job", "cancel", "team/train", environment=environment)
        assert (cancelled.returncode, cluster.deleted) == (0, ["train"]), cancelled.stderr
        gone = drivetrain("job", "cancel", "team/train", environment=environment)
        assert "kubectl delete failed" in gone.stderr
        assert "NotFound" in gone.stderr


@needs_kubectl
def test_a_cluster_without_jobset_says_how_it_is_installed(
    drivetrain: Callable, script: Callable, tmp_path: Path
) -> None:
    script("print(1)", "train.py")
    with played_kubernetes(PlayedCluster(has_jobset=False), tmp_path / "home") as environment:
        done = drivetrain(*LINE, "train.py", environment=environment)
    assert done.returncode == 2
    assert "JobSet is not installed in the cluster; its administrator installs it" in done.stderr


def test_without_kubectl_the_error_says_what_to_install(
    drivetrain: Callable, script: Callable, tmp_path: Path
) -> None:
    script("print(1)", "train.py")
    done = drivetrain(*LINE, "train.py", environment={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "kubectl is not installed here: install it (apt-get install kubernetes-client" in done.stderr


def test_a_plan_names_its_file_and_command_and_what_the_image_must_hold() -> None:
    submission = Kubernetes().plan(make_request(name="My Run", options={"image": "x"}, log_dir=Path("out")))
    assert list(submission.files) == [Path("out/my-run.jobset.yaml")]
    assert submission.command == ("kubectl", "create", "--filename=out/my-run.jobset.yaml")
    told = " ".join(submission.notes)
    assert "the image must hold /workspace" in told
    assert "called my-run there, since Kubernetes does not allow 'My Run'" in told


@pytest.mark.parametrize("trap", [*TRAPS[:6], "", "\n", "--all/x", "team/--all", "team/x y", "a/b/c"])
def test_no_job_id_reaches_kubectl_as_something_else(trap: str) -> None:
    submission = Kubernetes().plan(make_request(options={"image": "x"}))
    for call in (Kubernetes().cancel, lambda job: Kubernetes().follow(job, submission, print)):
        with pytest.raises(ClusterError, match="a job on kubernetes is NAMESPACE/NAME"):
            call(trap)
