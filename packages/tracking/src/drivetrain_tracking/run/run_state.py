"""The state in which a run ended, as its process knows it: finished, failed by an exception, or killed."""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar
from weakref import ref

logger = logging.getLogger(__name__)

# "killed" also stands for a process that could not say anything any more, such as after SIGKILL.
RunState: TypeAlias = Literal["finished", "failed", "killed"]


def state_of(error: BaseException | None) -> RunState:
    """Return the state of a run that ends with an exception or, if None, without an exception."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "finished"
    return "killed" if isinstance(error, KeyboardInterrupt) else "failed"


class EndAtExit:
    """A call of a function at this process's normal exit, unless cancelled.

    Forked children do not call the function, nor does a process that a signal or `os._exit` ends.
    """

    def __init__(self, end: Callable[[RunState], None]) -> None:
        # Called with "failed", or "killed" after Ctrl+C: the run did not say that it is finished.
        self._end = end
        self._process = os.getpid()
        self._earlier = sys.exception()  # one that is being handled already is none of the run's
        atexit.register(self._call)
        self._in_child: Any = None
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            # Children of multiprocessing make no calls of atexit. Elsewhere nothing needs the module.
            from multiprocessing.util import Finalize

            self._in_child = Finalize(None, self._call, exitpriority=1)

    def state_now(self) -> RunState:
        """Return the state of a run that ends now, maybe in a `finally` block after an error."""
        error = sys.exception()
        return "finished" if error is self._earlier else state_of(error)

    def cancel(self) -> None:
        """Cancel the call at the exit."""
        atexit.unregister(self._call)
        if self._in_child is not None:
            self._in_child.cancel()

    def _call(self) -> None:
        self.cancel()
        if os.getpid() != self._process:
            return
        error = sys.exception() or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None:
            logger.warning(
                "the process ends and the run was not ended: its platforms show it as failed; call finish() of its "
                "trackers, of an Accelerator end_training(), where the run is done"
            )
        self._end("killed" if isinstance(error, KeyboardInterrupt) else "failed")


Owner = TypeVar("Owner")


def in_forked_children(owner: Owner, put_right: Callable[[Owner], None]) -> None:
    """Call `put_right(owner)` first in each forked child while the owner lives: there, held locks stay locked."""
    known = ref(owner)

    def call() -> None:
        if (there := known()) is not None:
            put_right(there)

    os.register_at_fork(after_in_child=call)
