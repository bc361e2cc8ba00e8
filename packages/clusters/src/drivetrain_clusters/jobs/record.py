"""The record of a submitted job, with which `drivetrain job` finds it again."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobRequest
from drivetrain_config.files.file_text import parse_json, read_text
from drivetrain_config.values.conversion import ConversionError, convert
from drivetrain_config.values.kinds import plain
from drivetrain_messages import suggest

_ENDING = ".job.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A submitted job: its cluster, the cluster's name for it, and the request that it was planned from."""

    cluster: str
    job_id: str
    request: JobRequest


def write_private(path: Path, text: str) -> None:
    """Write a text file that only its owner can read, since variables of a job may be secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def write_record(record: JobRecord) -> Path:
    """Write the record of a job into its log folder, and return the path."""
    safe = re.sub(r"[^A-Za-z0-9.-]", "_", f"{record.cluster}-{record.job_id}")
    path = record.request.log_dir / f"{safe}{_ENDING}"
    write_private(path, json.dumps(plain(record), indent=2) + "\n")
    return path


def find_record(job_id: str, log_dir: Path) -> JobRecord:
    """Return the record of a job in a folder of logs; for an unknown id, a ClusterError lists the known ids."""
    known: list[str] = []
    for path in sorted(log_dir.glob(f"*{_ENDING}")):
        try:
            record = convert(parse_json(path, read_text(path)), JobRecord)
        except (OSError, ValueError, ConversionError) as error:
            raise ClusterError(
                f"{path}: is no record of a job that can be read: {error}; remove it"
            ) from error
        if record.job_id == job_id:
            return record
        known.append(record.job_id)
    hint = suggest(job_id, known) + (f"; there are {', '.join(known)}" if known else "")
    raise ClusterError(
        f"job {job_id}: {log_dir.absolute()} has no record of it{hint}; --log-dir names another folder"
    )
