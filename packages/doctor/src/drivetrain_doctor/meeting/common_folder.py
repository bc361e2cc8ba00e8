"""The folder of the checkpoints as all hosts see it, by a file that host 0 writes there."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckVerdict, DoctorFinding, warning

_SHOWN = 16


@contextmanager
def file_in(folder: Path) -> Generator[str]:
    """Keep a file in a folder during the block; its name is the value, empty if nothing can be written there."""
    file = folder / f".drivetrain-doctor-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        file.touch()
    except OSError:
        yield ""
        return
    try:
        yield file.name
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def judge_folder(
    sees: Mapping[int, bool], labels: Mapping[int, str], checked: CheckedRun, *, is_writable: bool
) -> CheckVerdict:
    """Name the hosts that do not see in the folder of the checkpoints what host 0 wrote there."""
    if not is_writable:
        return CheckVerdict(skipped=f"host 0 cannot write into {checked.folder.absolute()}")
    blind = [rank for rank, does in sorted(sees.items()) if not does]
    summary = f"{len(sees) - len(blind) + 1} of {len(sees) + 1} hosts share {checked.folder.absolute()}"
    if not blind:
        return CheckVerdict(summary=summary)
    who = ", ".join(labels[rank] for rank in blind[:_SHOWN])
    finding: DoctorFinding = warning(
        f"{who}: the folder {checked.folder} is not that of host 0",
        why="a sharded checkpoint is written by all hosts into one folder; it would be refused, or stay in parts",
        mend="name a folder on a file system that all hosts mount (--folder), or a URL of an object store; NFS "
        "may show "
        "new files late: mount it with actimeo=1",
    )
    return CheckVerdict(summary=summary, findings=(finding,))
