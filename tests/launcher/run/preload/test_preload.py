"""Ranks that are forked off a process with their modules: as fresh ones in all that a script can see, but sooner."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_launcher.run.preload.preload_process import open_accelerator
from launch_fixtures import Launch
from launcher.run.running import wait_for_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")

TWO = ("launch", "--num-processes", "2", "--preload", "json.tool")
# What differs between two fresh ranks, and what does not.
TELLS = """
import json, os, random, sys
seen = {
    "rank": os.environ["RANK"], "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
    "leads": os.getsid(0) == os.getpid(), "preloaded": "json.tool" in sys.modules, "random": random.random(),
    "variables": sorted(name for name in os.environ if "SPECIAL" in name or name.startswith("DRIVETRAIN_")),
    "lines": sys.stdout.line_buffering, "files": len(os.listdir("/proc/self/fd")), "hash": hash("a"),
    "cores": sorted(os.sched_getaffinity(0)), "threads": os.environ.get("OMP_NUM_THREADS"),
}
print(json.dumps(seen))
"""


def seen_by(launched: object) -> list[dict[str, object]]:
    """Return what each rank has written, by rank."""
    lines = str(launched).splitlines()
    found = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
    return sorted(found, key=lambda seen: seen["rank"])


@pytest.mark.slow
def test_a_forked_rank_sees_what_a_fresh_one_sees(drivetrain_with_torch: Callable, script: Callable) -> None:
    script(TELLS)
    rest = ("script.py", "--lr", "a b")
    fresh = drivetrain_with_torch("launch", "--num-processes", "2", *rest, environment={"SPECIAL": "1"})
    forked = drivetrain_with_torch(*TWO, *rest, environment={"SPECIAL": "1"})
    assert forked.returncode == fresh.returncode == 0, forked.stderr
    ranks, expected = seen_by(forked.stdout), seen_by(fresh.stdout)
    assert [rank["preloaded"] for rank in ranks] == [True, True]
    assert ranks[0]["random"] != ranks[1]["random"]
    assert ranks[0]["hash"] == ranks[1]["hash"]  # one hash seed: sets have one order on all ranks
    for name in ("argv", "path", "name", "file", "leads", "variables", "lines", "files", "cores", "threads"):
        assert [rank[name] for rank in ranks] == [rank[name] for rank in expected], name


def test_a_module_beside_the_script_is_imported_once_and_what_it_writes_is_seen_once(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "tables.py").write_text("import os\nprint('imported'); PARENT = os.getpid()\n")
    done = launch(
        "import os, tables\nassert tables.PARENT == os.getppid(), 'imported again'\n", "--preload", "tables"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "imported\n"


TRAINS = """
import torch
from torch import nn
from torch.utils.data import DataLoader
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, index): return torch.full((64,), float(index))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for batch in DataLoader(Numbers(), batch_size=4, num_workers=1):
    model(batch + dist.get_rank()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", torch.get_num_threads(), sum(p.double().sum().item() for p in model.parameters()))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("threads", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_forked_ranks_train_as_fresh_ones_do(
    drivetrain: Callable, drivetrain_with_torch: Callable, script: Callable, threads: str
) -> None:
    script(TRAINS)
    line = ("launch", "--num-processes", "2", "--threads-per-process", threads)
    fresh = drivetrain_with_torch(*line, "script.py")
    # OpenBLAS starts its threads at the import, which a test's Python with torch has done with one.
    launch = drivetrain_with_torch if threads == "1" else drivetrain
    forked = launch(*line, "--preload", "torch,numpy", "script.py")
    assert forked.returncode == 0, forked.stderr
    trained = [text.rpartition("trained ")[2] for text in forked.stdout.splitlines()]
    assert len(trained) == 2
    assert trained == [text.rpartition("trained ")[2] for text in fresh.stdout.splitlines()]
    assert trained[0].startswith(f"{threads} ")


def test_a_module_runs_too_and_numpy_draws_other_numbers_on_each_rank(
    drivetrain_with_torch: Callable, tmp_path: Path
) -> None:
    (tmp_path / "trains.py").write_text(
        "import numpy, os\nprint(os.environ['RANK'], numpy.random.random())\n"
    )
    done = drivetrain_with_torch("launch", "--num-processes", "2", "--preload", "numpy", "-m", "trains")
    assert done.returncode == 0, done.stderr
    assert len({line.split()[-1] for line in done.stdout.splitlines()}) == 2


@pytest.mark.slow
def test_failures_restarts_and_exit_codes_are_those_of_fresh_ranks(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script("import os, sys, time\nif os.environ['RANK'] == '1': raise ValueError('boom')\ntime.sleep(100)\n")
    raised = drivetrain_with_torch(*TWO, "--max-restarts", "1", "script.py")
    assert raised.returncode == 1
    assert raised.stderr.count("ValueError: boom\n") == 2
    assert "restarting all ranks (1 of 1)" in raised.stderr
    assert "preload" not in raised.stderr  # no frame of ours


@pytest.mark.slow
def test_cores_are_bound_before_the_script(launch: Launch) -> None:
    if len(cores := sorted(os.sched_getaffinity(0))) < 2:
        pytest.skip("one core cannot be divided")
    done = launch(TELLS, "--preload", "json.tool", "--bind", "auto")
    assert done.returncode == 0, done.stderr
    bound = [cpu for rank in seen_by(done.stdout) for cpu in rank["cores"]]  # pyright: ignore[reportGeneralTypeIssues]
    assert sorted(bound) == cores


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ("no_such_module", "no_such_module cannot be imported here.*No module named 'no_such_module'"),
        ("json.tool,starts", "importing starts starts 1 thread, which a forked rank would lack"),
        ("json.tool,ends", r"ends cannot be imported here \(SystemExit: no"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_preloaded_is_an_error(
    launch: Launch, tmp_path: Path, modules: str, told: str
) -> None:
    (tmp_path / "starts.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    (tmp_path / "ends.py").write_text("raise SystemExit('no')")
    done = launch("print('ran')", "--preload", modules)
    assert done.returncode == 2, done.stdout
    assert "ran" not in done.stdout
    assert f"--preload {modules}: " in done.stderr
    assert re.search(told, done.stderr), done.stderr


def test_variables_that_bind_threads_at_the_import_contradict_bound_cores(launch: Launch) -> None:
    done = launch("", "--preload", "json.tool", "--bind", "auto", environment={"OMP_PROC_BIND": "close"})
    assert done.returncode == 2
    assert "OMP_PROC_BIND is set, and would bind the threads of all ranks" in done.stderr


def test_an_accelerator_that_an_import_opens_is_found(tmp_path: Path) -> None:
    (tmp_path / "0").symlink_to("/dev/null")
    assert open_accelerator(tmp_path) == ""
    (tmp_path / "7").symlink_to("/dev/nvidia-uvm")
    assert open_accelerator(tmp_path) == "/dev/nvidia-uvm"


SLEEPS = "import os, time\nprint('ready', os.getpid(), os.getppid(), flush=True)\ntime.sleep(100)\n"


def ready_ranks(launched: object, count: int) -> list[tuple[int, int]]:
    """Return the process ids of the ranks and of their parents, once all are ready."""
    found: list[tuple[int, int]] = []
    while len(found) < count:
        line = launched.stdout.readline()  # pyright: ignore[reportAttributeAccessIssue]
        if "ready" in line:
            found.append(tuple(int(word) for word in line.split()[-2:]))  # pyright: ignore[reportArgumentType]
    return found


def test_ranks_are_forked_again_after_their_parent_was_killed(
    started_with_torch: Callable, script: Callable
) -> None:
    script(SLEEPS)
    launched = started_with_torch(*TWO, "--max-restarts", "1", "script.py")
    ranks = ready_ranks(launched, 2)
    os.kill(ranks[0][1], signal.SIGKILL)
    again = ready_ranks(launched, 2)
    assert {parent for _, parent in again}.isdisjoint({parent for _, parent in ranks})
    launched.send_signal(signal.SIGINT)
    assert launched.wait(timeout=60) == 130
    wait_for_end([pid for each in again for pid in each])
