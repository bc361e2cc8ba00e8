"""The launcher in the cells of a real Jupyter kernel, which has threads and whatever else a notebook starts."""

import base64
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.run.running import wait_for_end


def test_a_function_of_a_cell_runs_on_ranks_and_its_output_is_in_the_cell_that_called(notebook: Any) -> None:
    defined = notebook.run("""
from dataclasses import dataclass

@dataclass
class Config:
    scale: int

def double(number):
    return 2 * number

class Scaler:
    def __init__(self, config): self.config = config
    def apply(self, number): return number * self.config.scale

def train(config):
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    print("total", int(total))
    print("to stderr", file=sys.stderr)
    gathered = [None, None]
    dist.all_gather_object(gathered, Config(dist.get_rank()))  # pickled by name in the ranks
    return Config(double(int(total)) * config.scale), [each.scale for each in gathered], total
""")
    called = notebook.run("""
found = notebook_launcher(train, (Config(10),), num_processes=2)
print(found[0][0] == Config(60), type(found[1][0]) is Config, found[1][1], found[0][2])
""")
    assert not defined.outputs
    assert sorted(called.stdout.splitlines()[:2]) == ["[rank 0] total 3", "[rank 1] total 3"]
    assert called.stdout.splitlines()[2:] == ["True True [0, 1] tensor(3.)"]
    assert sorted(called.stderr.splitlines()) == ["[rank 0] to stderr", "[rank 1] to stderr"]


def test_an_error_is_shown_once_with_its_rank_and_the_line_of_the_cell(notebook: Any) -> None:
    cell = notebook.run("""
def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("boom")  # the line of the cell
    time.sleep(100)

debug_launcher(fail)
""")
    (error,) = cell.errors
    shown = "\n".join(error["traceback"])
    assert error["ename"] == "RankFailedError"
    assert "rank 1 (local rank 1, process " in shown
    assert shown.count('raise ValueError("boom")  # the line of the cell') == 1
    assert shown.count("ValueError: boom") == 1
    assert "site-packages" not in shown
    assert "drivetrain_launcher" not in shown
    assert not cell.stderr


@pytest.mark.slow
def test_the_stop_button_interrupts_the_ranks_which_may_save_and_the_next_call_works(
    notebook: Any, notebook_folder: Path
) -> None:
    cell = notebook.run_and_stop(
        """
workers = Workers(2, cpu=True)
def train():
    rank = os.environ["RANK"]
    try:
        open(f"ready{rank}", "w").close()
        while True: time.sleep(0.01)
    except KeyboardInterrupt:
        time.sleep(0.5)
        print("saved")
        raise
workers.run(train)
""",
        lambda: all((notebook_folder / f"ready{rank}").exists() for rank in range(2)),
    )
    (error,) = cell.errors
    assert error["ename"] == "KeyboardInterrupt", cell.outputs
    assert sorted(cell.stdout.splitlines()) == ["[rank 0] saved", "[rank 1] saved"]
    assert cell.stderr.count("interrupted: stopping 2 ranks, which have 30 s to save") == 1
    assert "Traceback" not in cell.stderr
    after = notebook.run("print(workers.run(os.getenv, ('RANK',)))\nworkers.close()")
    assert after.stdout == "['0', '1']\n", after.outputs


def test_a_collective_that_waits_for_an_interrupted_rank_ends_too(
    notebook: Any, notebook_folder: Path
) -> None:
    began = time.monotonic()
    cell = notebook.run_and_stop(
        """
def train():
    dist.init_process_group("gloo")
    dist.barrier()
    open(f"waits{dist.get_rank()}", "w").close()
    if dist.get_rank() == 0:
        while True: time.sleep(0.01)
    dist.barrier()  # in native code, where Python handles no signal
debug_launcher(train)
""",
        lambda: all((notebook_folder / f"waits{rank}").exists() for rank in range(2)),
    )
    assert [each["ename"] for each in cell.errors] == ["KeyboardInterrupt"], cell.outputs
    assert "killing" not in cell.stderr
    assert time.monotonic() - began < 100


@pytest.mark.slow
def test_figures_of_rank_0_are_shown_in_the_cell(notebook: Any) -> None:
    pytest.importorskip("matplotlib_inline")
    pytest.importorskip("matplotlib")
    cell = notebook.run("""
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as the kernel sets it
def draw():
    import matplotlib.pyplot as plt
    plt.plot([1, 2]); plt.show()
    plt.figure(); plt.plot([2, 1])  # shown at the end, as in a cell
    return plt.get_backend()
print(debug_launcher(draw))
del os.environ["MPLBACKEND"]
""")
    assert len(cell.images) == 2, cell.outputs
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in cell.images)
    assert "figure_backend" in cell.stdout


@pytest.mark.slow
def test_modules_beside_the_notebook_are_imported_by_ranks_and_again_when_they_change(
    notebook: Any, notebook_folder: Path
) -> None:
    module = notebook_folder / "beside.py"
    module.write_text("def answer(): return 'first'\n")
    os.utime(module, (1, 1))
    first = notebook.run("""
import beside
kept = Workers(2, cpu=True)
print(kept.run(beside.answer), kept.run(os.getpid) == kept.run(os.getpid))
""")
    module.write_text("def answer(): return 'second, which is longer'\n")
    second = notebook.run("print(kept.run(beside.answer))\nkept.close()")
    assert first.stdout == "['first', 'first'] True\n", first.outputs
    assert second.stdout == "['second, which is longer', 'second, which is longer']\n", second.outputs
    assert "beside.py has changed since the last call; the workers start anew" in second.stderr


@pytest.mark.slow  # each has a kernel of its own
@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_nothing_is_left_when_the_kernel_is(how: str, tmp_path: Path, opened_notebook: Callable) -> None:
    # A fresh interpreter: whoever kills the group of a preloaded one kills a process that stands for it.
    with opened_notebook(tmp_path, sys.executable) as notebook:
        pids = notebook.run("""
kept = Workers(2, cpu=True)
import subprocess, sys
ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
def child():
    started = subprocess.Popen([sys.executable, "-ISc", ignores], stdout=subprocess.PIPE)
    started.stdout.readline()
    return os.getpid(), started.pid
print(*sum(kept.run(child), ()))
""")
        notebook.end(how)
        running = [int(pid) for pid in pids.stdout.split()]
        assert len(running) == 4, pids.outputs
        wait_for_end(running)
