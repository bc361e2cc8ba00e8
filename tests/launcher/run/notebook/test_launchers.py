import os
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
"""


def test_one_process_is_this_one_with_its_precision_for_the_call() -> None:
    def place(name: str) -> tuple[str | None, ...]:
        return name, os.environ.get("RANK"), os.environ.get("DRIVETRAIN_RUN__MIXED_PRECISION")

    assert notebook_launcher(place, ("x",), 1, mixed_precision="bf16") == [("x", None, "bf16")]
    assert place("after") == ("after", None, None)


@pytest.mark.slow
def test_a_launch_after_one_that_failed_ends(run_source: Callable) -> None:
    source = """
import signal
before = signal.getsignal(signal.SIGINT)
def fail(): raise ValueError("boom")
def attempt():
    try:
        debug_launcher(fail, num_processes=1)
    except RankFailedError as error:
        return error
kept = attempt()
print(repr(kept.error), kept.rank, signal.getsignal(signal.SIGINT) is before)
print(debug_launcher(len, ("four",)), notebook_launcher(len, ("three",), num_processes=2))
"""
    done = run_source(NOTEBOOK + source)
    assert done.stdout == "ValueError('boom') 0 True\n[4, 4] [5, 5]\n", done.stderr


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
