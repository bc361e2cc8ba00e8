"""The runs of some folders, read and followed by a thread."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from drivetrain_tracking.view.log_reader import find_logs
from drivetrain_tracking.view.run_index import RunIndex

_POLL_SECONDS = 0.5
_SEARCH_SECONDS = 10.0


class RunCollection:
    """The runs of some folders, new runs last. Inside the context, a thread reads logs and looks for new logs."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="drivetrain track view", daemon=True)
        self.runs: list[RunIndex] = []
        self._search()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _search(self) -> None:
        known = {run.place.path for run in self.runs}
        self.runs += [RunIndex(place) for place in find_logs(self._folders) if place.path not in known]

    def _follow(self) -> None:
        searched = time.monotonic()
        while not self._closing.is_set():
            # A chunk of each run in turn: a short run is shown at once, beside one that takes half a minute.
            has_more = [run.advance() for run in self.runs]
            if not any(has_more):
                self._closing.wait(_POLL_SECONDS)
            if time.monotonic() - searched > _SEARCH_SECONDS:
                self._search()
                searched = time.monotonic()
