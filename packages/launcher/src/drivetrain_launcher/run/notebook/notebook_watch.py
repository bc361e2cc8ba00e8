"""End a rank whose notebook has ended without saying so: killed, or restarted."""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from threading import Thread

# The interval at which the parent process is checked; the end of the connection is noticed at once.
_LOOK_SECONDS = 1.0
# The time that a rank has to end by itself.
_STOP_SECONDS = 30.0

# Waits until a process group is empty, and kills it when time is up.
_KILL_GROUP = """
import os, sys, time
group, deadline = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
try:
    while time.monotonic() < deadline:
        os.killpg(group, 0)
        time.sleep(0.2)
    os.killpg(group, 9)
except ProcessLookupError:
    pass
"""


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
    if os.getpgrp() != os.getpid():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_STOP_SECONDS)  # time to save, if the function handles SIGTERM
        os.kill(os.getpid(), signal.SIGKILL)
    # A process of its own: this one may end by the signal, while a child in its group ignores it.
    subprocess.Popen(
        [sys.executable, "-ISc", _KILL_GROUP, str(os.getpid()), str(_STOP_SECONDS)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.kill(0, signal.SIGTERM)
