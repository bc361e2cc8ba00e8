"""Calls in threads of their own; unlike those of `concurrent.futures`, they may begin while the interpreter ends."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Event, Thread
from typing import Generic, TypeVar

Value = TypeVar("Value")
Item = TypeVar("Item")


class Task(Generic[Value]):
    """A call that has begun in a thread of its own: a save in the background may still be at work at the very end.

    Where no thread can be had it has ended already: the process has as many as it may, or it is ending and its Python
    (3.12.0 and 3.12.1) starts none any more.

    Args:
        call: What to do.
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
        """Wait until it has ended, however."""
        self._ended.wait()

    def result(self) -> Value:
        """Wait for what it returns.

        Raises:
            BaseException: Whatever it raised.
        """
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
    """The results of a function for each item, in order.

    Args:
        function: Called once for an item.
        items: What for.
        most: How many calls may run at once; with one there are no threads.

    Raises:
        BaseException: Whatever the first call that fails raises, when those that have begun have ended.
    """
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
