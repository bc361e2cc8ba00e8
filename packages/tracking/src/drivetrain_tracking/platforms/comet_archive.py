"""Comet's offline experiments as files: what they hold, while they run, when they ended, and after a kill."""

import json
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from drivetrain_tracking.platforms.compat import COMET_MESSAGES, write_comet_head

TIME_METRIC = "drivetrain/time"


def held_times(lines: Iterable[bytes]) -> Iterator[float]:
    """Yield the times of the records that lines of messages hold whole."""
    for line in lines:
        time = _time_of(line)
        if time is not None:
            yield time


def archive_lines(archive: Path) -> list[bytes]:
    """Return the lines of messages of an archive; one that was begun and not written has none."""
    with zipfile.ZipFile(archive) as file:
        return file.read(COMET_MESSAGES).splitlines() if COMET_MESSAGES in file.namelist() else []


class MessageFile:
    """A reader of the messages of a running experiment, which continues where its last read ended.

    Args:
        folder: The experiment's `tmpdir`.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / COMET_MESSAGES
        self._offset = 0

    def times(self) -> list[float]:
        """Return the times of the records that were added since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(held_times(whole.splitlines()))


def close_killed(
    folder: Path, archive: Path, *, project: str | None, workspace: str | None, is_new: bool
) -> None:
    """Make the archive of an experiment whose process was killed, and remove its folder.

    Values after the last whole record are left out: whoever continues the run writes that record again.
    """
    path = folder / COMET_MESSAGES
    if not path.exists():
        shutil.rmtree(folder)
        return
    path.write_bytes(b"".join(line + b"\n" for line in _whole_records(path.read_bytes())))
    key = archive.name.removesuffix(".zip").partition("-")[0]
    write_comet_head(folder, key=key, project=project, workspace=workspace, is_new=is_new)
    beside = archive.with_suffix(".new")
    with zipfile.ZipFile(beside, "w") as file:
        for one in sorted(folder.iterdir()):
            file.write(one, one.name)
    beside.replace(archive)
    shutil.rmtree(folder)


def _whole_records(data: bytes) -> list[bytes]:
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    last = max((number for number, line in enumerate(lines) if _time_of(line) is not None), default=-1)
    rest = [
        line for line in lines[last + 1 :] if json.loads(line)["type"] not in ("metric_msg", "file_upload")
    ]
    return lines[: last + 1] + rest


def _time_of(line: bytes) -> float | None:
    if TIME_METRIC.encode() not in line:
        return None
    message: dict[str, Any] = json.loads(line)
    if message["type"] != "metric_msg":
        return None
    metric = message["payload"]["metric"]
    return float(metric["metricValue"]) if metric["metricName"] == TIME_METRIC else None
