import os
import signal
import time
from collections.abc import Callable

import pytest

from drivetrain_launcher import LaunchError, debug_launcher, notebook_launcher

# What a notebook has done before: threads of native code, which would not exist in a fork.
NOTEBOOK = """
import os
import torch
import torch.distributed as dist
from drivetrain_launcher import LaunchError, RankFailedError, debug_launcher, notebook_launcher

torch.set_num_threads(2)
(torch.ones(512, 512, requires_grad=False) @ torch.ones(512, 512)).sum()

def train(scale):
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    (torch.ones(256, 256) @ torch.ones(256, 256)).sum()
    dist.destroy_process_group()
    return int(total) * scale
"""


def place(name: str) -> tuple[str, str | None]:
    return name, os.environ.get("RANK")


def test_one_process_is_this_one() -> None:
    assert notebook_launcher(place, ("x",), 1) == [("x", None)]


def test_mixed_precision_reaches_the_function_and_no_further() -> None:
    def said() -> str | None:
        return os.environ.get("DRIVETRAIN_RUN__MIXED_PRECISION")

    assert notebook_launcher(said, num_processes=1, mixed_precision="bf16") == ["bf16"]
    assert said() is None


def test_functions_of_a_notebook_run_on_several_processes(run_source: Callable) -> None:
    done = run_source(
        NOTEBOOK + "print(notebook_launcher(train, (10,), 2))\nprint(debug_launcher(train, (1,), 3))"
    )
    # torch 2.9's gloo prints who is connected.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert lines == ["[30, 30]", "[6, 6, 6]"], done.stderr


def test_a_failing_rank_is_shown_and_the_interpreter_goes_on(run_source: Callable) -> None:
    source = """
import signal, time
before = signal.getsignal(signal.SIGINT)
def fail(word):
    if os.environ["RANK"] == "1": raise ValueError(word)
    time.sleep(100)
try:
    debug_launcher(fail, ("boom",))
except RankFailedError as error:
    print(error)
print(signal.getsignal(signal.SIGINT) is before)
"""
    done = run_source(NOTEBOOK + source)
    assert "drivetrain: rank 1 (local rank 1, process " in done.stdout
    assert done.stdout.count("ValueError: boom") == 1
    assert done.stdout.endswith("True\n")
    assert done.stderr == ""


def test_a_rank_that_is_killed_is_named(run_source: Callable) -> None:
    source = "import signal\ndef die(): os.kill(os.getpid(), signal.SIGKILL)\n"
    done = run_source(NOTEBOOK + source + "debug_launcher(die, num_processes=2)")
    assert "was ended by SIGKILL: most likely the system ran out of memory" in done.stderr
    assert done.returncode == 1


def test_debug_launcher_trains_on_the_cpu(run_source: Callable) -> None:
    source = """
from drivetrain_state import StateSettings, connect
from drivetrain_config import resolve
def where():
    found = resolve(StateSettings, section="state")
    return found.value.device, str(found.sources["device"])
print(debug_launcher(where, num_processes=2)[1])
"""
    done = run_source(NOTEBOOK + source)
    assert done.stdout == "('cpu', 'DRIVETRAIN_STATE__DEVICE in the environment')\n", done.stderr


def test_a_launch_after_one_that_failed_ends(run_source: Callable) -> None:
    source = """
def fail(): raise ValueError("boom")
def attempt():
    try:
        debug_launcher(fail, num_processes=1)
    except RankFailedError as error:
        return error
kept = attempt()
print(repr(kept.error), kept.rank)
print(debug_launcher(len, ("four",)), notebook_launcher(len, ("three",), num_processes=2))
"""
    done = run_source(NOTEBOOK + source)
    assert done.stdout == "ValueError('boom') 0\n[4, 4] [5, 5]\n", done.stderr


@pytest.mark.slow
def test_ranks_of_a_function_end_when_their_parent_is_killed(
    started_with_torch: Callable, script: Callable
) -> None:
    script(
        NOTEBOOK
        + """
import signal, time
def wait_for_each_other():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torch has the kernel send it when the parent dies
    dist.init_process_group("gloo")
    os.write(1, b"ready\\n")
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    dist.barrier()  # in native code, where no handler of Python's runs
debug_launcher(wait_for_each_other)
"""
    )
    process = started_with_torch("launch", "--num-processes", "1", "script.py")
    began = time.monotonic()
    output = process.stdout.read()  # ends when the last rank has closed it
    assert (output.count("ready\n"), process.wait(60)) == (2, -signal.SIGKILL), output
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("number", [0, -1, "2", True])
@pytest.mark.parametrize("launch", [debug_launcher, notebook_launcher])
def test_a_number_of_processes_that_is_none_is_refused(launch: Callable, number: object) -> None:
    with pytest.raises(LaunchError, match=f"num_processes={number!r}: must be an integer of at least 1"):
        launch(print, num_processes=number)


@pytest.fixture
def run_source(drivetrain_with_torch: Callable, script: Callable) -> Callable:
    def run(source: str) -> object:
        script(source)
        return drivetrain_with_torch("launch", "--num-processes", "1", "script.py")

    return run
