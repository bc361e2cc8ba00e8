"""End a rank whose launcher has died: nobody else would, and it would hold its accelerator.

The standard library alone, so that a rank starts as fast as a bare script.
"""

import os
import signal
import sys
import time
from threading import Thread

# How often a rank looks whether its launcher still lives, in seconds.
_LOOK_INTERVAL_SECONDS = 1.0
# What a rank whose launcher has died has to end by itself, in seconds.
_STOP_SECONDS = 30.0


def watch_launcher(launcher: int) -> None:
    """Start the thread that ends this process once its launcher is gone.

    Args:
        launcher: The process that started this one.
    """
    Thread(target=_stop_with, args=(launcher,), name="launcher watch", daemon=True).start()


def _stop_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_INTERVAL_SECONDS)
    sys.stderr.write(f"drivetrain: the launcher (process {launcher}) of this rank died; the rank stops\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_SECONDS)  # to save, where the script handles the signal and its ranks can still agree
    if os.getpgrp() == os.getpid():  # what it has started goes too
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
