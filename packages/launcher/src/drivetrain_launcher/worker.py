"""The entry of each worker process: runs the script under an error recorder.

Started by its path as `python -u worker.py [-m] SCRIPT ARGUMENTS...`. Nothing heavy is imported, so that a worker
starts as fast as a bare script; what only a failure needs is imported then.
"""

import faulthandler
import os
import signal
import sys
import time
from threading import Thread

from drivetrain_launcher.as_main import run_as_main, show_error

# How often a worker looks whether its launcher still lives, in seconds.
_LOOK_INTERVAL_SECONDS = 1.0


def main() -> None:
    """Run what the command line names as the main program; an exception is left for the launcher to show."""
    is_module = sys.argv[1] == "-m"
    name, *arguments = sys.argv[1 + is_module :]
    launcher, worker = os.getppid(), os.getpid()
    faulthandler.enable()
    Thread(target=_stop_with_launcher, args=(launcher,), name="launcher watch", daemon=True).start()

    def leave(error: BaseException) -> None:
        # A process that the script forked is no rank, and without its launcher nobody would read a file.
        if os.getpid() == worker and os.getppid() == launcher:
            _record(error)
        else:
            show_error(error)

    try:
        run_as_main(name, arguments, is_module=is_module, on_error=leave)
    except KeyboardInterrupt:
        # The launcher says once that the run was interrupted; a traceback from each rank would bury it.
        sys.excepthook = _say_nothing
        raise


def _say_nothing(*_: object) -> None:
    """A hook in place of Python's."""


def _record(error: BaseException) -> None:
    """Leave an exception in the file that the agent reads; show it here where there is none."""
    from pathlib import Path

    from drivetrain_config import environ
    from drivetrain_launcher.failures import record_error

    file = environ.read("TORCHELASTIC_ERROR_FILE")
    # A hook that the script installed reports to a service, or shows the error in its own way: it has the first word.
    has_own_hook = sys.excepthook is not sys.__excepthook__
    if has_own_hook or not file:
        show_error(error)
    if file:
        record_error(Path(file), error, was_shown=has_own_hook)


def _stop_with_launcher(launcher: int) -> None:
    """End this process when its launcher has died: nobody else would, and it would hold its accelerator."""
    while os.getppid() == launcher:
        time.sleep(_LOOK_INTERVAL_SECONDS)
    sys.stderr.write(f"drivetrain: the launcher (process {launcher}) of this rank died; the rank stops\n")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
