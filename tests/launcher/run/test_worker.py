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


def test_a_script_runs_as_the_main_program_without_torch(work: Work, tmp_path: Path) -> None:
    done = work("import sys; print(__name__, sys.argv, sys.path[0], 'torch' in sys.modules)", "-m", "--x")
    assert done.stdout == f"__main__ ['script.py', '-m', '--x'] {tmp_path} False\n"
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("hook", "stdout", "was_shown"),
    [
        ("", "", False),
        (
            "before = sys.excepthook; sys.excepthook = lambda *given: (print('noted'), before(*given))",
            "noted\n",
            False,
        ),
        ("sys.excepthook = lambda *given: print('mine')", "mine\n", True),
    ],
    ids=["no hook", "one that wraps Python's", "one that replaces Python's"],
)
def test_an_exception_is_left_for_the_launcher_and_only_another_hook_has_shown_it(
    work: Work, tmp_path: Path, hook: str, stdout: str, was_shown: bool
) -> None:
    done = work(f"import sys\n{hook}\nraise ValueError('boom')")
    assert (done.stdout, done.stderr, done.returncode) == (stdout, "", 1)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert "drivetrain_launcher" not in message["extraInfo"]["py_callstack"]
    assert message["extraInfo"]["drivetrain_was_shown"] == was_shown


@pytest.mark.parametrize(
    ("source", "stderr", "code"),
    [
        ("import sys; sys.exit('a last word')", "a last word\n", 1),
        ("raise KeyboardInterrupt", "", -2),  # the launcher reports it
    ],
)
def test_exits_are_the_scripts_own(work: Work, tmp_path: Path, source: str, stderr: str, code: int) -> None:
    done = work(source)
    assert (done.stderr, done.returncode) == (stderr, code)
    assert not (tmp_path / "error.json").exists()


def test_a_process_that_the_script_forks_is_no_rank(work: Work, tmp_path: Path) -> None:
    done = work(
        "import os\nif os.fork() == 0: raise ValueError('in the child')\nos.wait(); print('parent goes on')"
    )
    assert "ValueError: in the child" in done.stderr
    assert done.stdout.endswith("parent goes on\n")
    assert not (tmp_path / "error.json").exists()


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
    shared = ("launch", "--cpu", "--prefix", "all", "--num-processes", str(num_ranks))
    done = drivetrain(*shared, *flags, "script.py")
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
