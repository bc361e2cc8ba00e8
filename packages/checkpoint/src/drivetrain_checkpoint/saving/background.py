"""One save at a time in a thread, while training goes on."""

import logging
from collections.abc import Callable
from threading import Thread

from drivetrain_checkpoint.storage.base import Place

logger = logging.getLogger(__name__)


class Background:
    """Runs a save in a thread. The interpreter does not end before it has."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._path: Place | None = None
        self._failure: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, run: Callable[[], Place], *, name: str) -> None:
        """Run a save; the last one must have been waited for.

        Args:
            run: Writes and commits.
            name: What it is, for the log.
        """
        assert self._thread is None
        thread = Thread(target=self._run, args=(run, name), name=f"drivetrain {name}")
        thread.start()
        self._thread = thread  # not one that could not start, for which no wait() would end

    def wait(self) -> Place | None:
        """Wait for the last save; its folder, or None if none was started since the last call.

        Raises:
            Exception: What the save raised; once.
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
        except Exception as error:  # raised by the next wait(); said now, for there may be none
            self._failure = error
            logger.exception("%s failed in the background; earlier checkpoints are untouched", name)
