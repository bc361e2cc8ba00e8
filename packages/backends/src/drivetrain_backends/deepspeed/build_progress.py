"""A word and progress while DeepSpeed compiles an operator, or waits for the lock of another build of it."""

import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, get_ident

from torch.utils.file_baton import FileBaton

from drivetrain_config import environ
from drivetrain_state import Context

_logger = logging.getLogger(__name__)
_LONGEST_COMPILATION = 600


@contextmanager
def telling_of_builds(context: Context, *, every_seconds: float = 5) -> Generator[None]:
    """Report progress during the block while it compiles an operator: on the CPU, DeepSpeed does so at first use.

    After `_LONGEST_COMPILATION` seconds, and while the block waits for a lock that nobody here holds, it stops, so
    that a hang is still detected.
    """
    done, thread_id = Event(), get_ident()

    def tell() -> None:
        told: str | None = None
        for _ in range(int(_LONGEST_COMPILATION / every_seconds)):
            if done.wait(every_seconds):
                return
            lock = _awaited_lock(thread_id)
            holders = [] if lock is None else _holders(lock)
            found = _of_build() if lock is None else _of_lock(lock, holders)
            if found != told and context.topology.local_rank == 0:
                _logger.warning(found)
            told = found
            if lock is None or holders:
                context.progress.mark("DeepSpeed compiles an operator")

    thread = Thread(target=tell, name="drivetrain-deepspeed-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _awaited_lock(thread_id: int) -> str | None:
    """Return the lock file that a thread waits for, as torch's `FileBaton` does; None if it does not wait."""
    frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code is FileBaton.wait.__code__:
            return frame.f_locals["self"].lock_file_path
        frame = frame.f_back
    return None


def _holders(lock: str) -> list[str]:
    """Return the processes of this machine that have a file open, as /proc lists them."""
    found: list[str] = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == os.path.realpath(lock):
                command = (link.parents[1] / "cmdline").read_text().replace("\0", " ").strip()
                found.append(f"{link.parents[1].name} ({command[:80]})")
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def _of_build() -> str:
    folder = environ.read("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    return (
        "DeepSpeed compiles an operator for this machine, about a minute; once, for it is kept in "
        f"{folder} (TORCH_EXTENSIONS_DIR)"
    )


def _of_lock(lock: str, holders: list[str]) -> str:
    if holders:
        return f"DeepSpeed waits for another build of its operator, by process {', '.join(holders)}: lock file {lock}"
    return (
        f"DeepSpeed waits for the lock file {lock}, which no process on this machine holds: it is of a build on "
        "another machine that shares the folder, or of one that was killed. If no such build runs, stop this run, "
        "delete the file and start again; TORCH_EXTENSIONS_DIR sets another folder"
    )
