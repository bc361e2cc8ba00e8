"""The contents of messages before and after a call."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSetup:
    """The state of the notebook that a rank takes over before a call.

    Attributes:
        rank: The rank of the process.
        environment: All environment variables.
        folder: The working folder.
        search_path: The notebook's `sys.path`.
    """

    rank: int
    environment: Mapping[str, str]
    folder: str
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An exception of the function, or of shipping it or its return value.

    Attributes:
        line: The exception in one line.
        traceback: The exception with its traceback, from the function's frame on.
        exception: The pickled exception; None if it cannot be pickled.
        time: The time, in seconds since the epoch.
    """

    line: str
    traceback: str
    exception: bytes | None
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A return value, still pickled.

    Attributes:
        content: The file: the times of change of the user's own modules, by file; then the value.
    """

    content: IO[bytes]

    def read(self) -> tuple[Mapping[str, int], Any]:
        """Return the modules' times and the value."""
        with self.content as content:
            content.seek(0)
            return pickle.load(content), pickle.load(content)
