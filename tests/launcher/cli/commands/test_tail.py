"""`drivetrain tail` as a user runs it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_launcher.cli.commands.tail import last_lines


def write(folder: Path, run: str, attempt: int, rank: int, text: str, name: str = "stdout.log") -> None:
    place = folder / run / f"attempt_{attempt}" / str(rank)
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_text(text)


def test_the_last_lines_of_each_rank_of_the_newest_attempt_are_shown(
    drivetrain: Callable, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    write(logs, "none_a", 0, 0, "old\n")
    write(logs, "none_b", 0, 0, "one\ntwo\nthree\n")
    write(logs, "none_b", 0, 1, "1%\r50%\r99%")
    write(logs, "none_b", 0, 1, "a warning\n", "stderr.log")
    done = drivetrain("tail", "--lines", "2", "logs")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "==> rank 0, stdout <==\ntwo\nthree\n==> rank 1, stdout <==\n99%\n==> rank 1, stderr <==\na warning\n"
    )
    assert (
        drivetrain("tail", "--ranks", "0", "--lines", "1", "logs").stdout == "==> rank 0, stdout <==\nthree\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "nowhere: holds no output of a run"),
        (("of_jobs",), "train-7.out is a submitted job's: drivetrain job follow shows it"),
        (("--lines", "0", "logs"), "lines=0: must be at least 1"),
        (("--ranks", "7", "logs"), "there is no 7"),
    ],
)
def test_bad_input_is_told(drivetrain: Callable, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    write(tmp_path / "logs", "none_a", 0, 0, "text\n")
    (tmp_path / "of_jobs").mkdir()
    (tmp_path / "of_jobs" / "train-7.out").touch()
    done = drivetrain("tail", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_only_the_end_of_a_large_file_is_read_and_invalid_text_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "stdout.log"
    file.write_bytes(b"x" * 10_000_000 + b"\nlast \xff\n\n")
    assert last_lines(file, 2) == ["last \ufffd", ""]
    assert last_lines(tmp_path / "none.log", 2) == []
