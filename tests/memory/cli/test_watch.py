import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from drivetrain_memory import read_summaries
from drivetrain_memory.cli.watch import WatchArguments, run
from drivetrain_memory.cli.watch_line import WatchLine, usage_line
from drivetrain_memory.tracker.sample_recorder import samples_file

# Ends once ten samples of it are in the file that its argument names.
IS_SAMPLED = """
import pathlib, sys, time
samples = pathlib.Path(sys.argv[1])
while not samples.exists() or samples.read_text().count("\\n") <= 10:
    time.sleep(0.01)
"""
TAKES = (
    "import mmap\n"
    "mmap.mmap(-1, 200 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()\n"
    f"{IS_SAMPLED}print('from the program', flush=True)\nraise SystemExit(7)"
)


def watch(tmp_path: Path, target: str, *arguments: str) -> int:
    return run(WatchArguments(target=target, command=arguments, interval=0.02, out=str(tmp_path)))


def test_a_command_keeps_its_output_and_exit_code_and_its_peak_is_the_kernels(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert watch(tmp_path, sys.executable, "-ISc", TAKES, str(samples_file(tmp_path, 0))) == 7
    out, err = capfd.readouterr()
    assert out == "from the program\n"
    assert "process " in err
    assert "by the kernel" in err
    (summary,) = read_summaries(tmp_path).ranks
    assert summary.host_peak_bytes > 200 * 2**20
    assert summary.num_samples >= 10
    assert "Memory of process" in (tmp_path / "memory.html").read_text()


def test_a_process_is_watched_until_it_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-ISc", IS_SAMPLED, samples_file(tmp_path, 0)]
    with subprocess.Popen(command) as process:
        assert watch(tmp_path, str(process.pid)) == 0
    out, err = capfd.readouterr()
    assert f"process {process.pid}" in out
    assert err == ""


def test_a_program_that_a_signal_ends_gives_the_shells_exit_code(tmp_path: Path) -> None:
    source = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert watch(tmp_path, sys.executable, "-ISc", source) == 128 + signal.SIGKILL


def test_what_is_not_there_is_a_plain_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert watch(tmp_path, "4194305") == 2
    assert watch(tmp_path, "no-such-program", "--flag") == 127
    assert watch(tmp_path, str(tmp_path)) == 126
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "drivetrain: error: no process 4194305: `ps` lists those that run"
    assert lines[1].startswith("drivetrain: error: no program 'no-such-program'")
    assert lines[2].endswith("Permission denied: " + repr(str(tmp_path)))
    with pytest.raises(ValueError, match=r"--interval 0: give 0\.001 to 3600 seconds"):
        WatchArguments(target="1", interval=0)


def test_a_folder_that_cannot_be_written_is_told_before_the_program_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    source = f"open({str(tmp_path / 'started')!r}, 'w')"
    assert watch(tmp_path / "file" / "out", sys.executable, "-ISc", source) == 2
    assert "cannot be written" in capfd.readouterr().err
    assert not (tmp_path / "started").exists()


def test_a_page_that_cannot_be_written_loses_no_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "memory.html").mkdir()
    assert watch(tmp_path, sys.executable, "-ISc", "raise SystemExit(7)") == 7
    assert "the watch ends here, the program goes on" in capfd.readouterr().err


def test_the_command_needs_no_torch() -> None:
    source = "import sys, drivetrain_memory.cli.watch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


SAMPLE = {
    "seconds": 65.4,
    "host/resident_bytes": 1e9,
    "cgroup/held_bytes": 3e9,
    "cgroup/limit_bytes": float("nan"),
}


def test_a_line_has_the_numbers_that_are_known_and_fits() -> None:
    assert usage_line(SAMPLE, 2e9) == "0:01:05  process   1.00 GB  peak   2.00 GB  cgroup   3.00 GB"
    more = {"nvidia:0/used_bytes": 5e9, "nvidia:1/used_bytes": 57.4e9, "nvidia:1/power_watts": 300.0}
    full = {**SAMPLE, **more, "cgroup/limit_bytes": 3.5e9, "children/resident_bytes": 123.45e6}
    line = usage_line(full, 999.99e6)
    assert line.endswith("peak 999.99 MB  nvidia:1  57.40 GB  left 500.00 MB  children 123.45 MB")
    assert len(line) <= 100
    assert "left       0 B" in usage_line({**full, "cgroup/limit_bytes": 3e9}, 0)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def shown(output: StringIO) -> str:
    line = WatchLine(output)
    for tenth in range(120):
        line.show({**SAMPLE, "seconds": tenth / 10}, 2e9)
    line.end("the end")
    return output.getvalue()


def test_a_terminal_gets_one_line_in_place() -> None:
    *lines, end = shown(Terminal()).split("\r\x1b[2K")
    assert end == "the end\n"
    assert len(lines) == 121  # the first is empty
    assert max(map(len, lines)) < 80
    assert not any("\n" in line for line in lines)


def test_a_pipe_gets_a_line_every_five_seconds() -> None:
    *lines, end = shown(StringIO()).splitlines()
    assert [line[:7] for line in lines] == ["0:00:00", "0:00:05", "0:00:10"]
    assert end == "the end"
