"""The program that stands for `python` does what Python does, but for the time that an import takes."""

import marshal
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from preloaded import receive
from processes import rank_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has it")


def environment() -> dict[str, str]:
    """Return a rank's variables as they are now: imports of other test modules add some while tests are collected."""
    return rank_environment(0, 1, 0, {})


def run(python: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # pyright: ignore[reportCallIssue]
        [python, *arguments],
        **{
            "env": environment(),
            "capture_output": True,
            "text": True,
            "check": False,
            "timeout": 60,
            **options,
        },
    )


def assert_same(python: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run both; they print the same and end alike."""
    fresh, forked = (run(each, *arguments, **options) for each in (sys.executable, python))
    assert (forked.returncode, forked.stdout, forked.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)
    return forked


def test_torch_is_there_before_the_first_line(python: str) -> None:
    assert (
        run(python, "-c", "import sys; print('torch' in sys.modules, sys.executable)").stdout
        == f"True {python}\n"
    )


def test_a_file_that_is_put_in_place_of_the_output_leaves_it_open(python: str) -> None:
    code = "import io, os, sys; sys.stdout = sys.stderr = io.StringIO(); os.write(1, b'still')"
    assert assert_same(python, "-u", "-c", code).stdout == "still"


def test_a_script_has_its_arguments_folder_input_and_variables(python: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(sys.argv, sys.path[0], __file__, __name__, os.getcwd(), sys.stdin.read())\n"
        "print(os.environ['TEST_X'], 'no' if 'RANK' in os.environ else 'yes')"
    )
    variables = {name: value for name, value in environment().items() if name != "RANK"} | {"TEST_X": "x"}
    done = assert_same(python, str(script), "a", "-b", cwd=tmp_path, input="said", env=variables)
    assert done.stdout.endswith("said\nx yes\n")


def test_modules_and_code_run_as_well(python: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import sys; print(sys.argv[1:], sys.path[0], __name__)")
    assert_same(python, "-m", "module", "a", cwd=tmp_path)
    assert_same(python, "-c", "import sys; print(sys.argv, __name__)", "a")
    assert_same(python, "-u", "-c", "import os; print('written', end=''); os._exit(3)")


def test_variables_of_a_search_path_are_searched(python: str, tmp_path: Path) -> None:
    (tmp_path / "found.py").write_text("print('found')")
    assert (
        assert_same(python, "-c", "import found", env={**environment(), "PYTHONPATH": str(tmp_path)}).stdout
        == "found\n"
    )


@pytest.mark.parametrize(
    "end",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('said')",
        "1 / 0",
        "raise KeyboardInterrupt",
        "import os; os.abort()",
    ],
)
def test_a_process_ends_as_it_does_in_python(python: str, end: str) -> None:
    assert_same(python, "-c", end)


def test_what_was_registered_runs_at_the_end(python: str) -> None:
    code = "import atexit, threading, time\natexit.register(print, 'last')\n"
    code += "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()"
    assert assert_same(python, "-c", code).stdout == "thread\nlast\n"


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """Let what a test starts hear SIGINT, which a shell has its background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on(python: str, number: signal.Signals) -> None:
    code = "import signal, time, sys\nfor n in (2, 15): signal.signal(n, lambda n, _: sys.exit(n))\n"
    code += "print('ready', flush=True)\ntime.sleep(60)"
    with subprocess.Popen(
        [python, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(100) == number


def test_a_signal_that_comes_before_an_order_is_read_waits_for_its_process() -> None:
    keeper, shim = socket.socketpair()
    with keeper, shim:
        order = marshal.dumps((["-c", "pass"], "/", {}, []))
        shim.sendall(len(order).to_bytes(8, "little") + order + bytes([signal.SIGTERM]))
        received = receive(keeper)
        assert received is not None
        assert received.arguments == ["-c", "pass"]
        assert keeper.recv(2) == bytes([signal.SIGTERM])


def test_a_process_is_killed_with_the_program_that_stands_for_it(python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen(
        [python, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 100
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_flags_and_variables_of_an_import_get_a_fresh_interpreter(python: str) -> None:
    code = "import sys; print('torch' in sys.modules, sys.flags.dev_mode)"
    assert run(python, "-X", "dev", "-c", code).stdout == "False True\n"
    assert run(python, "-c", code, env={**environment(), "MKL_NUM_THREADS": "1"}).stdout == "False False\n"
    assert os.path.basename(python) == "python"
