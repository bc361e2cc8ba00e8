"""A worker as the agent starts it, without the agent."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_launcher.plan.launch_plan import WORKER

Work = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """Run a script's source in a worker; its error file is error.json in `tmp_path`."""

    def run(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(source)
        return subprocess.run(
            [sys.executable, str(WORKER), "script.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_a_script_runs_as_the_main_program(work: Work, tmp_path: Path) -> None:
    done = work("import sys; print(__name__, sys.argv, sys.path[0])", "-m", "--x")
    assert done.stdout == f"__main__ ['script.py', '-m', '--x'] {tmp_path}\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_an_exception_is_left_for_the_launcher(work: Work, tmp_path: Path) -> None:
    done = work("raise ValueError('boom')")
    assert (done.stderr, done.returncode) == ("", 1)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert "drivetrain_launcher" not in message["extraInfo"]["py_callstack"]
    assert not message["extraInfo"]["drivetrain_was_shown"]


def test_a_hook_that_wraps_pythons_does_not_count_as_shown(work: Work, tmp_path: Path) -> None:
    done = work(
        "import sys\nbefore = sys.excepthook\n"
        "sys.excepthook = lambda *given: (print('noted'), before(*given))\nraise ValueError('boom')"
    )
    assert done.stdout == "noted\n"
    assert done.stderr == ""
    extra = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]
    assert not extra["drivetrain_was_shown"]


def test_a_hook_that_replaces_pythons_does(work: Work, tmp_path: Path) -> None:
    done = work("import sys\nsys.excepthook = lambda *given: print('mine')\nraise ValueError('boom')")
    assert done.stdout == "mine\n"
    extra = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]
    assert extra["drivetrain_was_shown"]


def test_exit_codes_are_the_scripts(work: Work, tmp_path: Path) -> None:
    done = work("import sys; sys.exit('a last word')")
    assert (done.stderr, done.returncode) == ("a last word\n", 1)
    assert not (tmp_path / "error.json").exists()


def test_a_process_that_the_script_forks_is_no_rank(work: Work, tmp_path: Path) -> None:
    done = work(
        "import os\nif os.fork() == 0: raise ValueError('in the child')\nos.wait(); print('parent goes on')"
    )
    assert "ValueError: in the child" in done.stderr
    assert done.stdout.endswith("parent goes on\n")
    assert not (tmp_path / "error.json").exists()


def test_an_interrupt_is_silent_and_ends_by_the_signal(work: Work) -> None:
    done = work("raise KeyboardInterrupt")
    assert (done.stderr, done.returncode) == ("", -2)


def test_a_worker_imports_no_torch(work: Work) -> None:
    assert work("import sys; print('torch' in sys.modules)").stdout == "False\n"


CHILD = """
import subprocess, sys
from drivetrain_config import environ
ask = "from drivetrain_config import environ; print(environ.inherited_from())"
print(environ.inherited_from(), flush=True)
subprocess.run([sys.executable, "-c", ask], check=True)
"""


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--preload", "json"),
        ("--rdzv-backend", "c10d", "--rdzv-id", "a", "--master-addr", "localhost", "--master-port", "0"),
    ],
    ids=["plain", "preloaded", "elastic"],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.slow
def test_a_child_that_a_rank_starts_before_it_connects_is_known_as_one(
    flags: tuple[str, ...], num_ranks: int, drivetrain: Callable, script: Callable
) -> None:
    script("import os\nprint(os.getpid())" + CHILD)
    done = drivetrain(
        "launch", "--cpu", "--prefix", "all", "--num-processes", str(num_ranks), *flags, "script.py"
    )
    assert done.returncode == 0, done.stderr
    lines = [line.rpartition("] ")[::2] for line in done.stdout.splitlines()]
    for rank in {rank for rank, _ in lines}:
        own, itself, child = [text for by, text in lines if by == rank]
        assert (itself, child) == ("None", own if num_ranks > 1 else "None")


@pytest.mark.slow
def test_a_program_may_start_the_rank(drivetrain: Callable, script: Callable) -> None:
    script(CHILD)
    done = drivetrain("launch", "--cpu", "--num-processes", "2", "--program", sys.executable, "script.py")
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["None"] * 4


def test_a_child_before_the_connection_is_refused_and_the_ranks_go_on(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script("from drivetrain_state import connect; connect(device='cpu')", "prepare.py")
    script(
        "import subprocess, sys\n"
        "done = subprocess.run([sys.executable, 'prepare.py'], capture_output=True, text=True)\n"
        "print(done.stderr.splitlines()[-1], flush=True)\n"
        "from drivetrain_state import connect\n"
        "context = connect(device='cpu')\nprint(context.topology.world_size, flush=True)\ncontext.close()\n"
    )
    done = drivetrain_with_torch("launch", "--cpu", "--num-processes", "2", "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("which is that rank, and cannot be it too") == 2
    assert {"2", "[rank 1] 2"} <= set(done.stdout.splitlines())  # the sizes that both ranks have met in
