"""End a rank whose launcher or notebook has died: the only protection of ranks without a keeper.

A launcher's keeper notices the launcher's death at once, and ends its ranks. This thread in each rank serves where
the keeper was killed too, and under a notebook, which has no keeper. Standard library only, so that a rank starts as
fast as a plain script.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from threading import Thread

from drivetrain_launcher.run.keeper import sessions

_LOOK_SECONDS = 1.0
# The time that a rank has to save.
_STOP_SECONDS = 30.0


def watch_owner(owner: int, *, role: str, parent: int, connection: int | None = None) -> Thread:
    """Start a thread that ends this process and its session once the owner has died.

    Args:
        owner: The process id of the launcher or notebook.
        role: "launcher" or "notebook", for the message.
        parent: The process id of the owner, or of the process that this one was forked off.
        connection: A socket to the owner, which closes when the owner ends. A process that the owner has forked may
            keep the other end open, so the parent process is watched too.
    """

    def watch() -> None:
        poller = select.poll()
        if connection is not None:
            # A hang-up is always reported, and messages are for the main thread.
            poller.register(connection, 0)
        while os.getppid() == parent and not poller.poll(_LOOK_SECONDS * 1000):
            pass
        while sessions.has_keeper(owner):
            time.sleep(_LOOK_SECONDS)
        with suppress(OSError):
            sys.stderr.write(
                f"drivetrain: the {role} (process {owner}) of this rank has died; the rank stops\n"
            )
        import subprocess

        # A process of its own ends the session: this one may end by the signal, while a child ignores it.
        subprocess.Popen(
            [sys.executable, "-IS", sessions.__file__, str(os.getpid()), str(_STOP_SECONDS)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(_STOP_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    thread = Thread(target=watch, name="orphan watch", daemon=True)
    thread.start()
    return thread
