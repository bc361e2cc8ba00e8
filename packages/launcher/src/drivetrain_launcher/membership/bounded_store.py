"""A connection to the store with a time limit on each call: torch's own calls wait forever for a frozen host."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

Result = TypeVar("Result")


class StoreSilentError(RuntimeError):
    """The store did not answer in time."""


class StoreGoneError(RuntimeError):
    """The store has closed the connection, or refuses a new connection."""


class BoundedStore:
    """A connection whose calls run on a separate thread, so that a caller can give up when its time is over.

    Calls of several threads take turns. After a call without an answer, later calls fail at once. The connection is
    never used again: a late answer would be taken for the answer to another call. `connect` runs on the thread.
    """

    def __init__(self, connect: Callable[[], TCPStore]) -> None:
        self._queue: SimpleQueue[tuple[Callable[[TCPStore], Any], Future[Any]] | None] = SimpleQueue()
        self._turn = Lock()
        self._is_stuck = False
        Thread(target=self._serve, args=(connect,), name="store connection", daemon=True).start()

    def call(self, function: Callable[[TCPStore], Result], *, seconds: float) -> Result:
        """Call a function with the store; raise StoreSilentError without an answer in time, or StoreGoneError."""
        future: Future[Result] = Future()
        if not self._turn.acquire(timeout=seconds):
            raise StoreSilentError(f"no answer within {seconds:g} s")
        try:
            if self._is_stuck:
                raise StoreSilentError("no answer to an earlier call")
            began = time.monotonic()
            self._queue.put((function, future))
            try:
                return future.result(seconds)
            except FutureTimeoutError:
                if time.monotonic() - began < 2 * seconds:
                    raise
                return future.result(seconds)  # this process itself stood still for the whole time
        except FutureTimeoutError as error:
            self._is_stuck = True
            raise StoreSilentError(f"no answer within {seconds:g} s") from error
        except DistNetworkError as error:
            self._is_stuck = True
            raise StoreGoneError(str(error)) from error
        except DistStoreError as error:
            raise StoreSilentError(str(error)) from error
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the thread, and with it the connection, as soon as the current call has ended."""
        self._queue.put(None)

    def _serve(self, connect: Callable[[], TCPStore]) -> None:
        store: TCPStore | None = None
        while (work := self._queue.get()) is not None:
            function, future = work
            try:
                store = connect() if store is None else store
                future.set_result(function(store))
            except RuntimeError as error:  # a connection that breaks, or a wait that ends
                future.set_exception(error)
