"""The process that writes to one platform: it follows the log until the run ends or the training process is gone."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from drivetrain_tracking.errors import SpoolInUseError
from drivetrain_tracking.forwarding.deliver_until_end import deliver_until_end
from drivetrain_tracking.forwarding.forwarder import Forwarder
from drivetrain_tracking.jsonl import JSONLTracker
from drivetrain_tracking.registry import make_tracker
from drivetrain_tracking.spool.files import read_json

logger = logging.getLogger(__name__)

EXIT_UNDELIVERED = 3


def options_path(log: Path, platform: str) -> Path:
    """Return the path of the file with the options for a platform's `start`, in the log's folder."""
    return log.with_name(f"{platform}.options.json")


def open_forwarder(log: Path, name: str) -> Forwarder:
    """Open the delivery of a log to a tracker of this name, with the options given at the run's start."""
    tracker = make_tracker(name, log.parent)
    if isinstance(tracker, JSONLTracker):  # it would append to the log that it is fed from
        raise SpoolInUseError(
            f"tracker {name!r} writes {log} itself, where the records are already; name another"
        )
    return Forwarder(log, tracker, options=read_json(options_path(log, tracker.name)))


def main(arguments: Sequence[str]) -> int:
    """Run the process, and return its exit code: 0 if all was delivered, 3 if the platform failed to the end."""
    parser = argparse.ArgumentParser(prog="drivetrain_tracking.forwarding")
    parser.add_argument("log", type=Path)
    parser.add_argument("tracker")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--seconds-after-end", type=float, required=True)
    parser.add_argument("--import-path", action="append", default=[])
    given = parser.parse_args(arguments)
    # Its own group gets no Ctrl+C of the terminal; the run's end, which the log tells, ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    sys.path[:0] = given.import_path
    forwarder = open_forwarder(given.log, given.tracker)
    try:
        is_delivered = deliver_until_end(
            forwarder,
            seconds_after_end=given.seconds_after_end,
            is_over=lambda: os.getppid() != given.parent,
        )
    finally:
        forwarder.close()
    return 0 if is_delivered else EXIT_UNDELIVERED
