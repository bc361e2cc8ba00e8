"""The folder of the checkpoints: whether it can be written, how fast, how much fits, and on what file system."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_messages import format_size

_NETWORK = ("nfs", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.", "9p", "glusterfs", "wekafs")
_IN_MEMORY = ("tmpfs", "ramfs")
_LEAST_FREE_BYTES = 10 << 30
_SLOW_BYTES_PER_SECOND = 50e6
_BLOCK_BYTES = 8 << 20
_MOST_BYTES = 256 << 20
_WRITE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMeasurement:
    """The folder of the checkpoints.

    Attributes:
        folder: The path of the folder, or of the nearest parent folder that exists.
        missing: The path of the folder if the folder does not exist yet and a parent was measured; else None.
        kind: The type of the folder's file system, such as "ext4"; empty if unknown.
        free_files: The number of files that can still be created; None if the file system has no limit.
        bytes_per_second: The speed of writing, until all bytes are on the disk; None if nothing could be written.
        refusal: The reason why nothing could be written, in the system's words.
    """

    folder: Path
    missing: Path | None = None
    kind: str = ""
    free_bytes: int = 0
    free_files: int | None = None
    bytes_per_second: float | None = None
    refusal: str = ""


def measure_disk(checked: CheckedRun, mounts: Path = Path("/proc/self/mountinfo")) -> DiskMeasurement:
    """Write into the folder for about a second, and remove the file."""
    folder = asked = checked.folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    space = os.statvfs(folder)
    innermost = (0, "")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].encode().decode("unicode_escape"))  # a blank is written as \040
        if folder.resolve().is_relative_to(point):
            innermost = max(innermost, (len(point.parts), after.split()[0]), key=lambda each: each[0])
    free_bytes, written, speed, refusal = space.f_bavail * space.f_frsize, 0, None, ""
    if free_bytes < _BLOCK_BYTES:
        refusal = "the file system is full"
    else:
        block = os.urandom(1 << 20) * (_BLOCK_BYTES >> 20)  # zeros might not be stored
        most = min(_MOST_BYTES, free_bytes // 2)
        try:
            begin = time.monotonic()
            # Nameless where the system can: a killed doctor leaves nothing behind.
            with TemporaryFile(dir=folder, prefix=".drivetrain-doctor-", buffering=0) as file:
                while written < most and time.monotonic() - begin < _WRITE_SECONDS:
                    written += file.write(block)
                    os.fsync(file.fileno())
                speed = written / max(time.monotonic() - begin, 1e-9)
        except OSError as refused:
            refusal = refused.strerror or str(refused)
    return DiskMeasurement(
        folder=folder,
        missing=None if folder == asked else asked,
        kind=innermost[1],
        free_bytes=free_bytes,
        free_files=space.f_favail or None if space.f_files else None,
        bytes_per_second=speed,
        refusal=refusal,
    )


def judge_disk(measured: DiskMeasurement, checked: CheckedRun) -> CheckReport:
    """Judge the folder for a run's checkpoints."""
    folder, kind = measured.folder, measured.kind or "unknown type"
    told = f"; {measured.missing} does not exist yet, so {folder} was measured" if measured.missing else ""
    speed = measured.bytes_per_second
    if speed is None:
        report = CheckReport(f"{folder}{told}")
        report.error(
            f"writing into {folder} ({kind}) fails: {measured.refusal}",
            why="the run fails at its first checkpoint, and loses the steps before it",
            repair=f"free space (df -h {folder}), or name another folder: drivetrain doctor --folder FOLDER",
            free_bytes=measured.free_bytes,
        )
        return report
    report = CheckReport(
        f"{kind}, writes {format_size(speed)}/s, {format_size(measured.free_bytes)} free in {folder}{told}"
    )
    _judge_room_and_speed(report, measured, speed)
    if measured.kind in _IN_MEMORY:
        report.warning(
            f"{folder} lies in memory ({measured.kind})",
            why="checkpoints take memory from the ranks, and are lost when the host or the container restarts",
            repair="name a folder on a disk",
        )
    elif measured.kind == "overlay":
        report.warning(
            f"{folder} lies in the container's own layer (overlay)",
            why="checkpoints are lost when the container ends, and a volume is faster to write",
            repair="mount a volume: docker run -v /data/checkpoints:/checkpoints; a PersistentVolumeClaim",
        )
    elif checked.num_nodes > 1 and measured.kind and not measured.kind.startswith(_NETWORK):
        report.warning(
            f"{folder} seems to lie on this host's own disk ({measured.kind})",
            why="all hosts write their parts of a checkpoint into one folder, so each host must see it",
            repair="name a folder on a file system that all hosts mount (NFS, Lustre ...), or a URL of an object "
            "store",
        )
    return report


def _judge_room_and_speed(report: CheckReport, measured: DiskMeasurement, speed: float) -> None:
    folder = measured.folder
    if measured.free_bytes < _LEAST_FREE_BYTES:
        model = measured.free_bytes / 16
        report.warning(
            f"only {format_size(measured.free_bytes)} free in {folder}",
            why=f"a checkpoint with AdamW's state takes 12 to 16 bytes a parameter, so that of "
            f"{model / 1e6:,.0f} million parameters fills it; a save keeps the old one until the new one is complete",
            repair="free space, or name another folder; keep_last in the checkpoint section removes old checkpoints",
            free_bytes=measured.free_bytes,
        )
    if measured.free_files is not None and measured.free_files < 1000:
        report.warning(
            f"{folder} has room for only {measured.free_files} more files (df -i)",
            why="a save fails with 'No space left on device', although bytes are free",
            repair="remove small files, or name another folder",
            free_files=measured.free_files,
        )
    if speed < _SLOW_BYTES_PER_SECOND:
        report.warning(
            f"writing into {folder} reaches only {format_size(speed)}/s",
            why=f"16 GB, the state of a billion parameters, take {16e9 / speed / 60:,.0f} min, during which "
            "ranks wait unless saves run in the background",
            repair="use a faster disk, or save in the background: --checkpoint-background",
            bytes_per_second=speed,
        )
