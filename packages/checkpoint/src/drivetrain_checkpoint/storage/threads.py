"""Run calls in threads that may start while the interpreter shuts down, unlike threads of `concurrent.futures`."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Event, Thread
from typing import Generic, TypeVar

Value = TypeVar("Value")
Item = TypeVar("Item")


class Task(Generic[Value]):
    """A call that runs in its own thread, even at interpreter shutdown, when a background save may still run.

    If no thread can be started, the constructor runs the call itself. This happens if the process has reached its
    limit of threads, or is shutting down under Python 3.12.0 or 3.12.1.
    """

    def __init__(self, call: Callable[[], Value]) -> None:
        self._call = call
        self._values: list[Value] = []
        self._failure: BaseException | None = None
        self._ended = Event()
        try:
            Thread(target=self._run, name="drivetrain checkpoint", daemon=True).start()
        except RuntimeError:
            self._run()

    def wait(self) -> None:
        """Wait until the call has returned or raised."""
        self._ended.wait()

    def result(self) -> Value:
        """Wait for the call and return its result."""
        self.wait()
        if self._failure is not None:
            raise self._failure
        return self._values[0]

    def _run(self) -> None:
        try:
            self._values.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self._failure = error
        finally:
            self._ended.set()


def in_threads(function: Callable[[Item], Value], items: Iterable[Item], *, most: int) -> Iterator[Value]:
    """Yield a function's results in the order of the items; raise the first error after all running calls."""
    if most <= 1:
        yield from map(function, items)
        return
    running: deque[Task[Value]] = deque()
    try:
        for item in items:
            if len(running) == most:
                yield running.popleft().result()
            running.append(Task(lambda item=item: function(item)))
        while running:
            yield running.popleft().result()
    finally:
        for task in running:
            task.wait()
