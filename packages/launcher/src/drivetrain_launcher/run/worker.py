"""The entry point of each worker process, which runs the script and records its error.

Started by path, as `python worker.py [-m] SCRIPT ARGUMENTS...`. It imports nothing heavy, so that a worker starts as
fast as a plain script; imports for a failure are deferred until one occurs. With `--preload=CONNECTION:MODULES`, it
imports these modules, and forks a worker whenever the launcher orders one.
"""

import faulthandler
import os
import sys
from io import TextIOWrapper
from types import TracebackType

from drivetrain_launcher.run.orphan_watch import watch_owner
from drivetrain_launcher.run.runpy_main import run_as_main, show_error


def main() -> None:
    """Run the target of the command line as the main program; record an exception for the launcher to show."""
    launcher = parent = os.getppid()
    if sys.argv[1].startswith("--preload="):
        import socket

        from drivetrain_config import environ
        from drivetrain_launcher.run.preload.preload_process import become_rank, serve

        number, _, modules = sys.argv.pop(1).removeprefix("--preload=").partition(":")
        if not sys.flags.safe_path:  # modules beside the script are found, as the script will find them
            folder = os.path.dirname(os.path.realpath(sys.argv[1]))
            sys.path[0] = os.getcwd() if sys.argv[1] == "-m" else folder
        order = serve(socket.socket(fileno=int(number)), modules.split(","))  # which returns in each rank
        become_rank(order)
        environ.replace(order.environment)
        parent = order.parent
    _run(launcher=launcher, parent=parent)


def _run(*, launcher: int, parent: int) -> None:
    """Run the target as the main program, forked off `parent` unless that is the launcher."""
    from drivetrain_config import environ

    is_module = sys.argv[1] == "-m"
    name, *arguments = sys.argv[1 + is_module :]
    if isinstance(sys.stdout, TextIOWrapper):
        # Flush promptly, as with python -u, but in whole lines, so that lines of different ranks do not mix.
        sys.stdout.reconfigure(line_buffering=True)
    recorder = ErrorRecorder(parent)
    sys.excepthook = recorder.hook
    faulthandler.enable()
    watch_owner(launcher, role="launcher", parent=parent)
    environ.own_rank()  # a child of the script is none, also before the script connects
    try:
        run_as_main(name, arguments, is_module=is_module, on_error=recorder.leave)
    except SystemExit as stop:
        recorder.leave_shown(stop)
        raise
    except KeyboardInterrupt:
        # The launcher reports the interruption once; a traceback from each rank would bury the report.
        def show_nothing(*_: object) -> None: ...

        sys.excepthook = show_nothing
        raise


class ErrorRecorder:
    """A recorder of a rank's exception, in the file that the agent reads for the launcher to show."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._rank = os.getpid()
        self._was_reached = False
        self._is_recorded = False

    def hook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Replace Python's own excepthook, at the end of the chain of hooks set by the script and torch."""
        if self._error_file():
            self._was_reached = True
        else:
            sys.__excepthook__(kind, error, traceback)

    def leave(self, error: BaseException) -> None:
        """Call the hooks, then record the exception, as already shown if no hook passed it on to `hook`."""
        show_error(error)
        self._record(error)

    def leave_shown(self, stop: SystemExit) -> None:
        """Record the script's exception after the program that ran the script has shown it by the hooks."""
        if self._was_reached and not self._is_recorded and stop.__context__ is not None:
            self._record(stop.__context__)

    def _record(self, error: BaseException) -> None:
        file = self._error_file()
        if file:
            self._is_recorded = True
            from pathlib import Path

            from drivetrain_launcher.run.failures import record_error

            record_error(Path(file), error, was_shown=not self._was_reached)

    def _error_file(self) -> str | None:
        """Return the agent's error file; None in a process forked by the script, or if the agent has died."""
        if os.getpid() != self._rank or os.getppid() != self._parent:
            return None
        from drivetrain_config import environ

        return environ.read("TORCHELASTIC_ERROR_FILE")


if __name__ == "__main__":
    main()
