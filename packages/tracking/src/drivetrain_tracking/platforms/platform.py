"""The base of all platforms: the order of calls, batches of records, the identity of a stopped run."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, cast

from drivetrain_tracking.errors import MissingLibraryError, TrackerStateError
from drivetrain_tracking.plain import Plain, plain_config, plain_values
from drivetrain_tracking.platform_library import missing_library
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.records import LoggedRecord, MediaKind


class Platform(ABC):
    """A tracker that writes to a platform, from the training process or from one of its own.

    It is a `Tracker`; a forwarder calls `write` with batches of records instead of `log`, and asks `count_held` after
    a failure. A subclass implements `open`, `write_records`, `close` and `count_held`, and imports its library in
    `open` only, through `load_library`.

    Attributes:
        name: The name of the tracker and of the extra that installs its library.
        library: The top module of the library.
        on_all_ranks: Always False: only rank 0 writes.
        joining_variables: Environment variables by which a child process would join a run of its parent's; the
            process that writes to the platform gets none of them.
        media_kinds: The kinds of media that the platform takes; others stay in files beside the log.
        directory: The folder that the platform may write to.

    Args:
        directory: The folder that the platform may write to, created when it starts.
    """

    name: ClassVar[str]
    library: ClassVar[str]
    on_all_ranks: ClassVar[bool] = False
    joining_variables: ClassVar[tuple[str, ...]] = ()
    media_kinds: ClassVar[frozenset[MediaKind]] = frozenset()

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory).absolute()
        self._is_started = False

    def check_library(self) -> None:
        """Check that the platform's library is installed, without importing it.

        Raises:
            MissingLibraryError: It is not; the message names the extra that brings it.
        """
        if find_spec(self.library) is None:
            raise MissingLibraryError(missing_library(self.library, self.name))

    def start(self, run_name: str, config: Metrics) -> None:
        """Start a run, or continue a stopped run of the same name.

        A subclass that takes options of its platform overrides this with keyword arguments that have defaults.

        Raises:
            TrackerStateError: It is started already.
            MissingLibraryError: The platform's library is not installed.
        """
        if self._is_started:
            raise TrackerStateError(f"{self.name}: start() again, while a run is open: finish() first")
        plain = plain_config(config)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.open(run_name, plain)
        self._is_started = True

    def log(self, values: Metrics, *, step: int | None = None) -> None:
        """Write values; they can be read back once the call returns.

        Raises:
            TrackerStateError: It is not started.
            ValueNotLoggableError: A value has a type that cannot be logged.
        """
        self.write([LoggedRecord(time=time.time(), step=step, values=plain_values(values))])

    def write(self, records: Sequence[LoggedRecord]) -> None:
        """Write records in order; a kill of this process takes none of them back once the call returns.

        Raises:
            TrackerStateError: It is not started.
        """
        if not self._is_started:
            raise TrackerStateError(
                f"{self.name}: a value before start(): call start(run_name, config) first"
            )
        self.write_records(records)

    def finish(self) -> None:
        """End the run, if it is started."""
        if self._is_started:
            self._is_started = False
            self.close()

    @abstractmethod
    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Open the run, or the stopped run of this name in `directory`."""

    @abstractmethod
    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write records in order, and flush them out of this process."""

    @abstractmethod
    def close(self) -> None:
        """End the run and release the library."""

    @abstractmethod
    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Return how many of these records, counted from the first, the platform holds already.

        A forwarder asks this of the records that were on their way when a writer was killed, or a call failed.
        """

    def record_plan(self, plan: Metrics) -> None:  # noqa: B027 - most have no place for it
        """Keep the run's effective plan. Platforms without a place for it leave it to the log."""

    def run_id(self, run_name: str) -> str | None:
        """Return the platform's own id of a stopped run of this name, or None."""
        known = self._known_ids()
        return known.get(run_name)

    def remember_run_id(self, run_name: str, run_id: str) -> None:
        """Remember the platform's own id of a run, so that a later process continues it."""
        place = self._ids_file()
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_suffix(".new")
        beside.write_text(json.dumps({**self._known_ids(), run_name: run_id}))
        beside.replace(place)

    def _ids_file(self) -> Path:
        return self.directory / f"{self.name}.runs.json"

    def _known_ids(self) -> dict[str, str]:
        try:
            return cast("dict[str, str]", json.loads(self._ids_file().read_text()))
        except FileNotFoundError:
            return {}


def folder_name(run_name: str) -> str:
    """Return a run's name as the name of one folder: no separators, no leading dot, at most 100 characters."""
    kept = "".join(one if one.isalnum() or one in "-_. " else "-" for one in run_name).strip(" .")
    return kept[:100] or "run"
