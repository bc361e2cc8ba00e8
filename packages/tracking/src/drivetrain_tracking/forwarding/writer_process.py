"""Start the process that writes to a platform, and restart it after a crash; training never waits for the process."""

import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain_tracking.forwarding.delivery import Delivery, delivery_path
from drivetrain_tracking.forwarding.writer_main import EXIT_UNDELIVERED

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0
_MOST_CRASHES = 8  # in a row, without a record delivered between them
_SILENCE_SECONDS = 60.0  # until a warning of a platform that takes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterCommand:
    """The arguments of a writer process."""

    log: Path
    tracker: str  # the name by which it makes its tracker
    platform: str  # the tracker's name, which its files beside the log have
    seconds_after_end: float  # for which it tries a failing platform again once this process is gone
    import_path: Sequence[str] = ()
    left_out: Sequence[str] = ()  # environment variables that the writer does not inherit

    def arguments(self) -> list[str]:
        """Return the command line of a writer that belongs to this process."""
        paths = [part for path in self.import_path for part in ("--import-path", path)]
        without = ["env", *(part for name in self.left_out for part in ("-u", name))] if self.left_out else []
        return [
            *without,
            *(sys.executable, "-m", "drivetrain_tracking.forwarding", str(self.log), self.tracker),
            *("--parent", str(os.getpid()), "--seconds-after-end", str(self.seconds_after_end)),
            *paths,
        ]

    @property
    def output(self) -> Path:
        """The file for the output that the writer and the platform's library print."""
        return self.log.with_name(f"{self.platform}.writer.log")


class WriterProcess:
    """A writer process that a thread keeps running until `finish`."""

    def __init__(self, command: WriterCommand) -> None:
        self._command = command
        self._process = self._launch()
        self._is_finishing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"drivetrain {command.platform}", daemon=True)
        self._keeper.start()

    def finish(self, timeout_seconds: float) -> bool:
        """Wait for the writer to deliver the finished log, and end the writer after the timeout."""
        self._is_finishing.set()
        self._keeper.join()
        try:
            return self._process.wait(timeout_seconds) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()  # a call of a platform's library may not hear anything else
            self._process.wait()
            return False

    def _launch(self) -> "subprocess.Popen[bytes]":
        with self._command.output.open("ab") as output:
            return subprocess.Popen(
                self._command.arguments(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl+C of the terminal is for the training
            )

    def _keep(self) -> None:
        crashes, delivered, silent_at = 0, self._delivered(), time.monotonic() + _SILENCE_SECONDS
        while not self._is_finishing.wait(_POLL_SECONDS):
            now_delivered = self._delivered()
            if now_delivered != delivered:
                crashes, delivered, silent_at = 0, now_delivered, time.monotonic() + _SILENCE_SECONDS
            elif time.monotonic() > silent_at and self._command.log.stat().st_size > delivered:
                silent_at = math.inf  # one warning
                logger.warning(
                    "tracker %r has taken nothing for %d s; training goes on, and the values wait in %s (see %s)",
                    self._command.platform,
                    _SILENCE_SECONDS,
                    self._command.log,
                    self._command.output,
                )
            if self._process.poll() is None:
                continue
            crashes += 1
            if crashes > _MOST_CRASHES:
                self._tell_end(f"has crashed {crashes} times in a row; training goes on without it")
                return
            pause = min(2.0 ** (crashes - 1), _LONGEST_PAUSE_SECONDS)
            self._tell_end(f"is started again in {pause:g} s; training goes on")
            if self._is_finishing.wait(pause):
                pause = 0.0
            self._process = self._launch()

    def _delivered(self) -> int:
        return Delivery.load(delivery_path(self._command.log, self._command.platform)).offset

    def _tell_end(self, what_next: str) -> None:
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        how = "its failure" if code == EXIT_UNDELIVERED else how
        logger.warning(
            "the process that writes to %r ended with %s and %s (see %s)",
            self._command.platform,
            how,
            what_next,
            self._command.output,
        )
