"""Ranks start on the cores that the plan gives them, and the launcher keeps its own."""

import os
import subprocess
import sys

import pytest

from drivetrain_launcher import LaunchPlan, LaunchTarget
from drivetrain_launcher.plan.core_binding import CoreBinding
from drivetrain_launcher.run.rank_starter import RankStarter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are bound on Linux")


def test_a_rank_starts_on_its_cores_and_the_launcher_keeps_its_own() -> None:
    cores = sorted(os.sched_getaffinity(0))
    bindings = tuple(CoreBinding(cpus=(cpu,), num_cores=1, numa_nodes=(0,)) for cpu in (cores[-1], cores[0]))
    plan = LaunchPlan(mode="elastic", target=LaunchTarget(name="x.py"), bindings=bindings)

    def start_fresh() -> subprocess.Popen[str]:
        tells = "import os; print(*os.sched_getaffinity(0))"
        return subprocess.Popen([sys.executable, "-ISc", tells], stdout=subprocess.PIPE, text=True)

    starter = RankStarter(
        plan, None, lambda pids: pytest.fail(f"fresh ranks {pids} are found by their variables")
    )
    for local_rank, expected in enumerate((cores[-1], cores[0])):
        process = starter.start(local_rank, {}, (None, None), start_fresh)
        assert isinstance(process, subprocess.Popen)
        assert process.communicate(timeout=60)[0] == f"{expected}\n"
    assert sorted(os.sched_getaffinity(0)) == cores
