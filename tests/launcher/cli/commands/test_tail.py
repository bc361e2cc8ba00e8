"""`drivetrain tail` as a user runs it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_launcher.cli.commands.tail import last_lines


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with the output of two runs, and that of a submitted job."""
    monkeypatch.chdir(tmp_path)
    write("logs/none_a/attempt_0/0/stdout.log", "old\n")
    write("logs/none_b/attempt_0/0/stdout.log", "one\ntwo\nthree\n")
    write("logs/none_b/attempt_0/1/stdout.log", "1%\r50%\r99%")
    write("logs/none_b/attempt_0/1/stderr.log", "a warning\n")
    write("of_jobs/train-7.out", "")


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ("--lines", "2", "logs"),
            "==> rank 0, stdout <==\ntwo\nthree\n==> rank 1, stdout <==\n99%\n==> rank 1, stderr <==\na warning\n",
        ),
        (("--ranks", "0", "--lines", "1", "logs"), "==> rank 0, stdout <==\nthree\n"),
    ],
)
def test_the_last_lines_of_each_rank_of_the_newest_attempt_are_shown(
    drivetrain_here: Callable, words: tuple[str, ...], shown: str
) -> None:
    done = drivetrain_here("tail", *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "nowhere: holds no output of a run"),
        (("of_jobs",), "train-7.out is a submitted job's: drivetrain job follow shows it"),
        (("--lines", "0", "logs"), "lines=0: must be at least 1"),
        (("--ranks", "7", "logs"), "there is no 7"),
    ],
)
def test_bad_input_is_told(drivetrain_here: Callable, words: tuple[str, ...], said: str) -> None:
    done = drivetrain_here("tail", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_only_the_end_of_a_large_file_is_read_and_invalid_text_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "stdout.log"
    file.write_bytes(b"x" * 10_000_000 + b"\nlast \xff\n\n")
    assert last_lines(file, 2) == ["last \ufffd", ""]
    assert last_lines(tmp_path / "none.log", 2) == []
