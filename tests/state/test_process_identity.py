"""Whether another process on this host runs, or has ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_state.process_identity import has_ended, process_identity, runs_beside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's files are Linux's")


def test_a_child_that_ends_is_noticed_before_and_after_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        identity = process_identity(child.pid)
        assert not has_ended(identity)
        assert runs_beside(identity) == child.pid
        child.stdin.close()
        while not has_ended(identity):  # a zombie until it is waited for
            pass
        child.wait()
        assert has_ended(identity)
        assert runs_beside(identity) is None


def test_this_process_runs_but_not_beside_itself() -> None:
    assert not has_ended(process_identity())
    assert runs_beside(process_identity()) is None


def test_an_id_that_another_process_has_now_is_not_taken_for_the_first() -> None:
    namespace, pid, started = process_identity(os.getppid()).split()
    earlier = f"{namespace} {pid} {int(started) - 1}"
    assert has_ended(earlier)
    assert runs_beside(earlier) is None


def test_processes_of_other_hosts_and_containers_are_not_judged(tmp_path: Path) -> None:
    assert not has_ended("elsewhere 1073741824 5")
    assert process_identity(proc=tmp_path).endswith(" 0")
    assert not has_ended(process_identity(proc=tmp_path))
