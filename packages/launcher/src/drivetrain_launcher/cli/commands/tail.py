"""Show the last lines of each rank's output."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from drivetrain_launcher.errors import UsageError
from drivetrain_messages import argument

TOPIC = "Watch"  # in `drivetrain --help`

# What is read from the end of a file for each line that is asked for.
_LINE_BYTES = 4096
_STREAMS = ("stdout.log", "stderr.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class TailArguments:
    """The arguments of `drivetrain tail`."""

    folder: Path = argument(..., "Folder that was given to drivetrain launch as --log-dir.", positional=True)
    lines: int = argument(10, "Number of last lines of each file.")
    ranks: tuple[int, ...] = argument((), "Ranks of the node to show, such as 0,3; empty: all.")

    def __post_init__(self) -> None:
        if self.lines < 1:
            raise ValueError(f"lines={self.lines}: must be at least 1")


def run(arguments: TailArguments) -> int:
    """Show the last lines of each rank's output file, also while the run goes on."""
    attempt = newest_attempt(arguments.folder)
    ranks = sorted(int(each.name) for each in attempt.iterdir() if each.name.isdigit())
    missing = [rank for rank in arguments.ranks if rank not in ranks]
    if missing:
        raise UsageError(
            f"--ranks {','.join(map(str, arguments.ranks))}: {attempt} has files of ranks "
            f"{', '.join(map(str, ranks))}; there is no {', '.join(map(str, missing))}"
        )
    for rank in arguments.ranks or ranks:
        for name in _STREAMS:
            if found := last_lines(attempt / str(rank) / name, arguments.lines):
                title = f"==> rank {rank}, {name.removesuffix('.log')} <=="
                sys.stdout.write("\n".join([title, *found, ""]))
    return 0


def newest_attempt(folder: Path) -> Path:
    """Return the folder of the newest attempt of the newest run."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda each: each.stat().st_mtime_ns)
    if not attempts:
        of_jobs = sorted(each.name for each in folder.glob("*.out"))
        raise UsageError(
            f"{folder}: holds no output of a run; say the folder that was given to drivetrain launch as --log-dir"
            + (f". {of_jobs[-1]} is a submitted job's: drivetrain job follow shows it" if of_jobs else "")
        )
    return attempts[-1]


def last_lines(file: Path, lines: int) -> list[str]:
    """Return the last lines of a file, which may be large and still grow; no lines if the file is missing.

    If carriage returns have overwritten a line, as in a progress bar, the line's last state is returned.
    """
    if not file.exists():
        return []
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        length = min(size, lines * _LINE_BYTES)
        opened.seek(size - length)
        text = opened.read(length).decode("utf-8", "replace")
    states = [[state for state in line.split("\r") if state.strip()] for line in text.split("\n")]
    if states and not states[-1]:
        states.pop()
    return [line[-1] if line else "" for line in states[-lines:]]
