"""Threads that make tuples from generators: CPython fails in them if anything else holds such a tuple meanwhile."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def tuples_on_threads() -> Generator[list[SystemError]]:
    """Make tuples on two threads in the block; yield the errors."""
    ended, failures = Event(), list[SystemError]()

    def make() -> None:
        while not ended.is_set():
            try:
                tuple((number, number) for number in range(2000))
            except SystemError as error:
                failures.append(error)

    threads = [Thread(target=make) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # so that threads take turns in the midst of a search
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        for thread in threads:
            thread.join()
