"""Aim, imported so that processes can be forked afterwards; see killed_trackers.py."""

import os

from aim.sdk.lock_manager import LockManager


def _take_own_pid() -> None:
    LockManager.pid = os.getpid()  # Aim reads it on import, and a lock is void once its process is gone


os.register_at_fork(after_in_child=_take_own_pid)
