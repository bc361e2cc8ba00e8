import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from drivetrain_tracking.view.command import ViewArguments, check_folders, run
from logged_runs import start_line, value_lines, write_log

# Children of a shell's background job ignore Ctrl-C; this one must not.
_SERVE = """
import signal, sys
from drivetrain_tracking.view.command import ViewArguments, run
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run(ViewArguments(folders=(sys.argv[1],))))
"""


def test_the_command_prints_its_address_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    write_log(tmp_path, [start_line(), *value_lines([1])])
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.fullmatch(r"1 run at (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends it\)\n", said)
            assert found, said
            with urllib.request.urlopen(found[1], timeout=30) as response:
                assert response.status == 200
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=30) == ("\n", "")
            assert process.returncode == 0
        finally:
            process.kill()


def test_it_is_registered_as_a_command_of_two_words() -> None:
    (point,) = entry_points(group="drivetrain.commands", name="track.view")
    assert point.load() is run


def test_a_port_in_use_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, value_lines([1]))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(ViewArguments(folders=(str(tmp_path),), port=port)) == 2
    told = capsys.readouterr().err
    assert (
        told
        == f"drivetrain: error: --port {port} is in use: name another one, or leave it out to take any free port\n"
    )


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_does_not_exist_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"--port {port}: say a number"):
        ViewArguments(folders=("runs",), port=port)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            None,
            r"holds no log\.jsonl, nor do the folders .*; .*|holds no log\.jsonl.*name the folder that runs log to",
        ),
        (b"epoch,loss\n1,2\n", "is no log of drivetrain: its lines have neither a time nor an event"),
        (b'{"epoch": 1, "loss": 2}\n', "is no log of drivetrain"),
    ],
)
def test_a_folder_without_a_log_of_ours_is_told(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "log.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_folders([tmp_path])


@pytest.mark.parametrize("content", [b"", b'{"event": "sta', b'half a line\n{"time": 1.0, "loss": 2}\n'])
def test_a_run_that_has_just_begun_or_was_killed_at_its_first_line_is_taken(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "log.jsonl").write_bytes(content)
    check_folders([tmp_path])


def test_a_path_that_is_no_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log(tmp_path, value_lines([1]))
    assert run(ViewArguments(folders=(str(path),))) == 2
    assert "is a file: name the folder of a run" in capsys.readouterr().err
    assert run(ViewArguments(folders=(str(tmp_path / "gone"),))) == 2
    assert "is not there: name the folder of a run" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
def test_a_log_that_may_not_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, value_lines([1])).chmod(0)
    assert run(ViewArguments(folders=(str(tmp_path),))) == 2
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_in_the_place_of_a_log_is_told_at_once_or_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None]
) -> None:
    make(tmp_path / "log.jsonl")
    assert run(ViewArguments(folders=(str(tmp_path),))) == 2
    told = capsys.readouterr().err
    assert "is no regular file, but a pipe, a folder" in told or "holds no log.jsonl" in told
