"""Serve a page that shows runs."""

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain_messages import argument
from drivetrain_tracking.spool.files import open_regular
from drivetrain_tracking.spool.line import LOG_NAME
from drivetrain_tracking.view.log_reader import find_logs, parse_lines
from drivetrain_tracking.view.run_collection import RunCollection
from drivetrain_tracking.view.server import ViewServer

TOPIC = "Watch"  # in `drivetrain --help`

_USAGE = 2  # exit code of a command that cannot be carried out
_MOST_PORT = 65535
_FIRST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewArguments:
    """The arguments of `drivetrain track view`."""

    folders: tuple[str, ...] = argument(
        ..., f"Folders of runs: each has a {LOG_NAME}, or holds folders that do.", positional=True
    )
    port: int = argument(0, "Port on 127.0.0.1; by default, any free one.")

    def __post_init__(self) -> None:
        """Check the port."""
        if not 0 <= self.port <= _MOST_PORT:
            raise ValueError(
                f"--port {self.port}: say a number from 1 to {_MOST_PORT}, or 0 for any free port"
            )


def run(arguments: ViewArguments) -> int:
    """Show runs in a browser: curves, settings and their differences."""
    folders = [Path(text).expanduser() for text in arguments.folders]
    try:
        check_folders(folders)
        collection = RunCollection(folders)
        server = open_server(collection, arguments.port)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"drivetrain: error: {' '.join(str(error).split())}\n")
        return _USAGE
    counted = f"{len(collection.runs)} run{'' if len(collection.runs) == 1 else 's'}"
    with server, collection:
        sys.stdout.write(f"{counted} at {server.address} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0


def check_folders(folders: Sequence[Path]) -> None:
    """Check that each folder exists and holds logs of runs."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is {'a file' if folder.is_file() else 'not there'}: name the folder of a run, which "
                f"holds its {LOG_NAME}, or one with several runs in it"
            )
        places = find_logs([folder])
        if not places:
            raise ValueError(
                f"{folder} holds no {LOG_NAME}, nor do the folders up to four levels below it: name the folder that "
                "runs log to, and see that they use the tracker 'jsonl'"
            )
        for place in places:
            check_kind(place.path)


def check_kind(log: Path) -> None:
    """Check that a log begins with a record of a run; accept an empty log, whose run has just begun."""
    with os.fdopen(open_regular(log), "rb") as file:
        lines = file.read(_FIRST_BYTES).split(b"\n")
    # The last line may be cut; a run may also have been killed in its first line, so any line will do.
    whole = [line for line in lines[:-1] if line.strip()]
    records, _ = parse_lines(whole)
    if whole and not any("event" in record or "time" in record for record in records):
        raise ValueError(
            f"{log} is no log of drivetrain: its lines have neither a time nor an event. Name folders whose log "
            "the tracker 'jsonl' has written"
        )


def open_server(collection: RunCollection, port: int) -> ViewServer:
    """Return a listening server."""
    try:
        return ViewServer(collection, port)
    except OSError as error:
        why = {errno.EADDRINUSE: "is in use", errno.EACCES: "needs rights that this user lacks"}
        said = why.get(error.errno or 0, os.strerror(error.errno or errno.EIO))
        raise OSError(
            f"--port {port} {said}: name another one, or leave it out to take any free port"
        ) from error
