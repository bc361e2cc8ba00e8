"""Run one save at a time in a thread, while training continues."""

import logging
from collections.abc import Callable
from threading import Thread

from drivetrain_checkpoint.storage.base import Place

logger = logging.getLogger(__name__)


class Background:
    """A runner of saves in a thread. The interpreter waits for the thread before it exits."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._path: Place | None = None
        self._failure: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """True if a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, run: Callable[[], Place], *, name: str) -> None:
        """Start a save; `wait` must have been called for the last one.

        Args:
            run: A function that writes and commits a checkpoint and returns its folder.
            name: The name of the save in log messages.
        """
        assert self._thread is None
        thread = Thread(target=self._run, args=(run, name), name=f"drivetrain {name}")
        thread.start()
        self._thread = thread  # after start(), which may raise: join() of an unstarted thread is an error

    def wait(self) -> Place | None:
        """Wait for the last save and return its folder, or None if none was started since the last call.

        Raises:
            Exception: The error of the save; raised once.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._path

    def _run(self, run: Callable[[], Place], name: str) -> None:
        self._path = None
        try:
            self._path = run()
        except Exception as error:  # the next wait() raises it; logged now, since wait() may never be called
            self._failure = error
            logger.exception("%s failed in the background; earlier checkpoints are untouched", name)
