"""End a rank whose notebook has ended without saying so: killed, or restarted."""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from threading import Thread

# The interval at which the parent process is checked; the end of the connection is noticed at once.
_LOOK_SECONDS = 1.0
# The time that a rank has to end by itself.
_STOP_SECONDS = 30.0


def watch_notebook(number: int) -> Thread:
    """Start and return a thread that ends this process, with its group, once the notebook has ended.

    Args:
        number: The number of the socket to the notebook. A process that the notebook has forked may keep the other
            end open, so the parent process is watched too.
    """
    parent = os.getppid()
    own = os.dup(number)  # stays open while this process ends
    watch = Thread(target=_stop_with, args=(own, parent), name="notebook watch", daemon=True)
    watch.start()
    return watch


def _stop_with(number: int, parent: int) -> None:
    poller = select.poll()
    poller.register(number, 0)  # a hang-up is always reported, and messages are for the main thread
    while os.getppid() == parent and not poller.poll(_LOOK_SECONDS * 1000):
        pass
    with suppress(OSError):
        sys.stderr.write(
            f"drivetrain: the notebook (process {parent}) of this rank has ended; the rank stops\n"
        )
    target = 0 if os.getpgrp() == os.getpid() else os.getpid()
    os.kill(target, signal.SIGTERM)
    time.sleep(_STOP_SECONDS)  # time to save, if the function handles SIGTERM
    os.kill(target, signal.SIGKILL)
