"""Open a file for one process alone, until it unlocks or ends, by any signal too."""

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path

from drivetrain_tracking.opening import open_regular

logger = logging.getLogger(__name__)


def open_alone(path: Path, *, taken: Exception) -> int:
    """Open a file to read and write, created if need be, and lock it. A file system without locks is warned of.

    Raises:
        Exception: `taken`, if another process has locked the file.
    """
    file = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise taken from None
    except OSError as error:
        logger.warning("%s has no locks (%s): a second process that writes there is not noticed", path, error)
    return file


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file, which must exist."""
    file = open_regular(path)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)
    return False


def unlock(file: int) -> None:
    """Release the lock also for forked children that have not closed their copy of the file yet."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_UN)
