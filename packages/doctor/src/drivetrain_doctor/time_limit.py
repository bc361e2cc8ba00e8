"""A time limit for a call that has none of its own, such as one that waits for a driver or a file server."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

_Result = TypeVar("_Result")


def within(seconds: float, call: Callable[[], _Result], *, name: str) -> _Result:
    """Return what a call returns, or raise what it raises, within a time; else leave its thread behind.

    Raises:
        TimeoutError: It did not end in time. The thread of that name ends with the process at the latest.
    """
    answers: SimpleQueue[tuple[_Result, None] | tuple[None, BaseException]] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put((call(), None))
        except BaseException as failure:  # noqa: BLE001 raised again by the caller's thread
            answers.put((None, failure))

    threading.Thread(target=answer, daemon=True, name=name).start()
    try:
        result, failure = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"{name} did not end within {seconds:g} s") from None
    if failure is not None:
        raise failure
    return result  # pyright: ignore[reportReturnType] a call without a failure has a result
