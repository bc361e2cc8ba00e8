"""Send a run's log to a platform after the run."""

import sys
from dataclasses import dataclass
from pathlib import Path

from drivetrain_messages import argument, format_size
from drivetrain_tracking.errors import (
    DeliveryFileError,
    DeliveryInUseError,
    MissingLibraryError,
    SpoolInUseError,
    UnknownTrackerError,
)
from drivetrain_tracking.forwarding.deliver_until_end import deliver_until_end
from drivetrain_tracking.forwarding.delivery import Delivery
from drivetrain_tracking.forwarding.writer_main import open_forwarder
from drivetrain_tracking.spool.line import LOG_NAME

TOPIC = "Watch"  # in `drivetrain --help`

_UNDELIVERED, _USAGE = 1, 2  # exit codes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayArguments:
    """The arguments of `drivetrain track replay`."""

    folder: Path = argument(..., f"Folder of the run, which holds {LOG_NAME}.", positional=True)
    to: str = argument(
        ...,
        "Tracker to send to: wandb, mlflow, ..., or module:Class of your own.",
        plugins="drivetrain.trackers",
    )
    from_start: bool = argument(
        False, "Whether to begin at the first record, and leave out those that the platform holds."
    )
    patience_seconds: float = argument(60.0, "Seconds for which a platform that fails is tried again.")


def run(arguments: ReplayArguments) -> int:
    """Send a run's log to a tracking platform."""
    log = arguments.folder / LOG_NAME
    if not log.is_file():
        sys.stderr.write(f"{arguments.folder}: there is no {LOG_NAME} in it; name the project_dir of a run\n")
        return _USAGE
    size_bytes = log.stat().st_size
    try:
        forwarder = open_forwarder(log, arguments.to)  # refuses while another process delivers
        if arguments.from_start:
            forwarder.close()
            # As if all of the log was on its way when a process was killed: so the platform is asked what it holds.
            Delivery(sending_end=size_bytes).save(forwarder.place)
            forwarder = open_forwarder(log, arguments.to)
    except (
        UnknownTrackerError,
        MissingLibraryError,
        DeliveryFileError,
        DeliveryInUseError,
        SpoolInUseError,
    ) as error:
        sys.stderr.write(f"{error}\n")
        return _USAGE
    before = forwarder.delivery

    def show_progress(delivery: Delivery) -> None:
        if sys.stderr.isatty():
            share = delivery.offset / max(1, size_bytes)
            sys.stderr.write(f"\r{share:4.0%} of {format_size(size_bytes)}")
            sys.stderr.flush()

    try:
        is_delivered = deliver_until_end(
            forwarder,
            seconds_after_end=arguments.patience_seconds,
            is_over=lambda: True,
            on_progress=show_progress,
        )
    finally:
        forwarder.close()
    after = forwarder.delivery
    told = f"{after.num_delivered - before.num_delivered} records sent to {arguments.to}"
    if refused := after.num_refused - before.num_refused:
        told += f", {refused} that it does not take"
    if forwarder.num_damaged:
        told += f", {forwarder.num_damaged} damaged lines passed over"
    sys.stdout.write(
        (told if is_delivered else f"{told}; the rest was not taken: run the command again") + "\n"
    )
    return 0 if is_delivered else _UNDELIVERED
