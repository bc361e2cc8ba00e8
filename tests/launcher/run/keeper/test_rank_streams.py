"""The output of several ranks as a user sees it: on a terminal, in pipes and in files."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from launch_fixtures import Launch
from optional_modules import import_later

# A terminal emulator, which is not there where the package is tried alone.
pyte = import_later("pyte")

COLUMNS, ROWS = 90, 16

BARS = """
import os, sys, time
if os.environ["RANK"] == "0":
    assert os.isatty(1) and os.isatty(2) and os.get_terminal_size().columns == int(sys.argv[1])
    from tqdm import tqdm
    from rich.progress import track
    for _ in tqdm(range(30), desc="outer"):
        for _ in tqdm(range(3), desc="inner", leave=False): time.sleep(0.01)
    for _ in track(range(30), description="rich"): time.sleep(0.03)
else:
    assert not os.isatty(1)
    for step in range(60):
        print("step", step)
        time.sleep(0.03)
"""
"""Rank 0 draws nested bars of tqdm, then one of rich; rank 1 prints meanwhile."""


def in_a_terminal(python: str, folder: Path, environment: dict[str, str], *words: str) -> tuple[bytes, int]:
    """Run `drivetrain WORDS` in a terminal; return all that reached it, and the exit code."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        command = [python, "-m", "drivetrain_launcher", *words]
        os.execve(python, command, environment)
    seen: list[bytes] = []
    while True:
        try:
            seen.append(os.read(terminal, 1 << 16))
        except OSError:  # nobody holds the other side any more
            break
    os.close(terminal)
    return b"".join(seen), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def rows_of(output: bytes) -> list[str]:
    """Return every row of the terminal, those that have left it first."""
    emulator = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000, ratio=0.5)
    pyte.ByteStream(emulator).feed(output)
    gone = ["".join(row[column].data for column in range(COLUMNS)) for row in emulator.history.top]
    return [row.rstrip() for row in (*gone, *emulator.display) if row.strip()]


@pytest.mark.costly
@pytest.mark.slow
def test_bars_of_rank_0_stay_whole_on_a_terminal_while_other_ranks_print(
    script: Callable, tmp_path: Path, users_environment: Callable
) -> None:
    script(BARS)
    words = ("launch", "--cpu", "--num-processes", "2", "script.py", str(COLUMNS))
    # A fresh interpreter, since a preloaded one has left the terminal's session.
    output, code = in_a_terminal(sys.executable, tmp_path, users_environment(TERM="xterm-256color"), *words)
    rows = rows_of(output)
    assert code == 0, rows
    assert [row for row in rows if row.startswith("[rank 1]")] == [
        f"[rank 1] step {step}" for step in range(60)
    ]
    drawn = [row for row in rows if not row.startswith(("[rank 1]", "drivetrain:", " not crowd"))]
    drawn = [row for row in drawn if "threads-per-process" not in row]
    assert [row.split()[0] for row in drawn] == ["outer:", "rich"], rows
    assert "100%" in drawn[0]
    assert "100%" in drawn[1]
    assert b"\x1b[38;5;" in output  # the prefix is coloured
    assert b"]\x1b[0m step" in output  # the text is not


def test_in_pipes_outputs_stay_apart_rank_0_is_unchanged_and_others_are_marked(launch: Launch) -> None:
    done = launch(
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "for number in range(3): print('out', rank, number); print('err', rank, number, file=sys.stderr)\n"
        "sys.stdout.write('no newline')\n",
        "--cpu",
    )
    assert done.returncode == 0, done.stderr
    for name, text in (("out", done.stdout), ("err", done.stderr)):
        lines = [line for line in text.splitlines() if not line.startswith("drivetrain:")]
        mine = [line for line in lines if not line.startswith("[rank 1] ")]
        others = [line for line in lines if line.startswith("[rank 1] ")]
        end = ["no newline"] if name == "out" else []
        assert mine == [*(f"{name} 0 {number}" for number in range(3)), *end]
        assert others == [
            f"[rank 1] {line}" for line in (*(f"{name} 1 {number}" for number in range(3)), *end)
        ]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--prefix", "all"), ["[rank 0] rank 0", "[rank 1] rank 1"]),
        (("--no-prefix",), ["rank 0", "rank 1"]),
        (("--show-ranks", "1"), ["[rank 1] rank 1"]),
    ],
)
@pytest.mark.default_cases("flags0-expected0")
def test_what_is_shown_can_be_chosen(launch: Launch, flags: tuple[str, ...], expected: list[str]) -> None:
    done = launch("import os\nprint('rank', os.environ['RANK'])\n", "--cpu", *flags)
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.costly
def test_files_hold_every_byte_of_ranks_that_are_not_shown_whose_last_lines_are_shown_on_failure(
    launch: Launch, tmp_path: Path
) -> None:
    flags = ("--show-ranks", "0", "--log-dir", "logs")
    done = launch(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0': time.sleep(100)\n"
        "os.write(1, b'\\xff\\x00\\r50%\\x1b[31m' + b'x' * 200_000 + b'\\nlast words\\n')\n"
        "os._exit(3)\n",
        "--cpu",
        *flags,
    )
    assert done.returncode == 3
    assert done.stdout == ""
    file = next((tmp_path / "logs").glob("*/attempt_0/1/stdout.log"))
    assert file.read_bytes() == b"\xff\x00\r50%\x1b[31m" + b"x" * 200_000 + b"\nlast words\n"
    told = done.stderr.index("drivetrain: the last 2 lines of rank 1:\n")
    assert done.stderr.index("  last words\n") > told
    assert done.stderr.splitlines()[-1].endswith("ended with exit code 3, and no exception")


@pytest.mark.costly
@pytest.mark.slow
def test_100_megabytes_pass_complete_and_in_order(launch: Launch) -> None:
    done = launch(
        "import os, sys\n"
        "line = b'%08d' + b'y' * 991 + b'\\n'\n"
        "for start in range(0, 50_000, 500):\n"
        "    os.write(1, b''.join(line % number for number in range(start, start + 500)))\n",
        "--cpu",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    numbers = re.compile(r"(\[rank 1\] )?(\d{8})y{991}")
    found = [numbers.fullmatch(line) for line in lines]
    assert all(found)
    assert [each[2] for each in found if each and each[1]] == [f"{number:08d}" for number in range(50_000)]
    assert [each[2] for each in found if each and not each[1]] == [
        f"{number:08d}" for number in range(50_000)
    ]


@pytest.mark.costly
def test_output_that_nobody_reads_any_more_does_not_stop_the_ranks(
    python: str, script: Callable, tmp_path: Path, users_environment: Callable
) -> None:
    script(
        "import os, pathlib\n"
        "for number in range(20_000): print('line', number, 'x' * 50)\n"
        "pathlib.Path('done' + os.environ['RANK']).touch()\n"
    )
    launch = subprocess.Popen(
        [python, "-m", "drivetrain_launcher", "launch", "--cpu", "--num-processes", "2", "script.py"],
        cwd=tmp_path,
        env=users_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert launch.stdout is not None
    launch.stdout.readline()
    launch.stdout.close()  # as `| head -1` does
    assert launch.wait(120) == 0
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()
