"""The entry of each worker process: runs the script under an error recorder.

Started by its path as `python worker.py [-m] SCRIPT ARGUMENTS...`. Nothing heavy is imported, so that a worker
starts as fast as a bare script; what only a failure needs is imported then.
"""

import faulthandler
import os
import sys
from io import TextIOWrapper
from types import TracebackType

from drivetrain_launcher.run.parent_watch import watch_launcher
from drivetrain_launcher.run.runpy_main import run_as_main, show_error


def main() -> None:
    """Run what the command line names as the main program; an exception is left for the launcher to show."""
    is_module = sys.argv[1] == "-m"
    name, *arguments = sys.argv[1 + is_module :]
    if isinstance(sys.stdout, TextIOWrapper):
        # At once, as with python -u, but in whole lines, so that those of two ranks do not mix.
        sys.stdout.reconfigure(line_buffering=True)
    recorder = Recorder()
    sys.excepthook = recorder.hook
    faulthandler.enable()
    watch_launcher(recorder.launcher)
    try:
        run_as_main(name, arguments, is_module=is_module, on_error=recorder.leave)
    except KeyboardInterrupt:
        # The launcher says once that the run was interrupted; a traceback from each rank would bury it.
        sys.excepthook = _say_nothing
        raise


class Recorder:
    """Leaves a rank's exception in the file that the agent reads, for the launcher to show."""

    def __init__(self) -> None:
        self.launcher = os.getppid()
        self._rank = os.getpid()
        self._was_reached = False

    def hook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Stands where Python's own hook stands, at the end of whatever the script and torch put before it."""
        if self._error_file():
            self._was_reached = True
        else:
            sys.__excepthook__(kind, error, traceback)

    def leave(self, error: BaseException) -> None:
        """Let the hooks have their word, then leave the exception; a hook that kept it to itself has shown it."""
        show_error(error)
        file = self._error_file()
        if file:
            from pathlib import Path

            from drivetrain_launcher.run.failures import record_error

            record_error(Path(file), error, was_shown=not self._was_reached)

    def _error_file(self) -> str | None:
        """The agent's file; None in a process that the script forked, and when the agent has died."""
        if os.getpid() != self._rank or os.getppid() != self.launcher:
            return None
        from drivetrain_config import environ

        return environ.read("TORCHELASTIC_ERROR_FILE")


def _say_nothing(*_: object) -> None:
    """A hook in place of Python's."""


if __name__ == "__main__":
    main()
