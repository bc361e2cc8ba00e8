"""End a rank whose launcher has died, as it would otherwise keep running and hold its accelerator.

Imports only the standard library, so that a rank starts as fast as a plain script.
"""

import os
import signal
import sys
import time
from threading import Thread

from drivetrain_launcher.run.keeper.sessions import has_keeper, kill_others_of_session

# The interval at which a rank checks that its launcher is alive.
_LOOK_INTERVAL_SECONDS = 1.0
# The time that a rank has to end by itself after its launcher has died.
_STOP_SECONDS = 30.0


def watch_launcher(launcher: int, *, parent: int) -> None:
    """Start a thread that ends this process once its launcher has died.

    Args:
        launcher: The process id of the launcher.
        parent: The process id of the launcher, or of the process that this one was forked off.
    """
    Thread(target=_stop_with, args=(launcher, parent), name="launcher watch", daemon=True).start()


def _stop_with(launcher: int, parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_INTERVAL_SECONDS)
    # A launcher's keeper knows at once, stops its ranks and kills them in time. This is for ranks that have none, as
    # those of a notebook, or no longer one.
    while has_keeper(launcher):
        time.sleep(_LOOK_INTERVAL_SECONDS)
    sys.stderr.write(f"drivetrain: the launcher (process {launcher}) of this rank died; the rank stops\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_SECONDS)  # time to save, if the script handles SIGTERM and its ranks still communicate
    if os.getsid(0) == os.getpid():  # kill its child processes too
        kill_others_of_session(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
