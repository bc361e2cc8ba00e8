"""The base of all platforms: the order of calls, batches of records, the identity of a stopped run."""

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from drivetrain_tracking.arguments import check_options
from drivetrain_tracking.errors import MissingLibraryError, TrackerStateError
from drivetrain_tracking.platforms.conventions import CONVENTIONS, Conventions, PlatformNames
from drivetrain_tracking.protocol import Metrics, Tracker
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.spool.files import read_json, replace_text
from drivetrain_tracking.values.plain import Plain, plain_config, plain_values
from drivetrain_tracking.values.records import LoggedRecord, MediaKind

_PAUSE_SECONDS = 0.005
_LONGEST_WAIT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a platform that takes none."""


Options = TypeVar("Options")


class Platform(ABC, Generic[Options]):
    """A tracker that writes to a platform, from the training process or from a writer process.

    It is a `Tracker`; a forwarder calls `write` with batches of records instead of `log`, and asks `count_held` after
    a failure. A subclass implements `open`, `write_records`, `close` and `keep_document`, and imports its library in
    `open` only, through `load_library`.

    Attributes:
        name: The name of the tracker and of the extra that installs its library.
        library: The top module of the library.
        on_all_ranks: Always False: only rank 0 writes.
        joining_variables: Environment variables by which a child process would join its parent's run; the writer
            process gets none of these variables.
        media_kinds: The kinds of media that the platform takes; other media stay in files beside the log.
        options_type: The frozen dataclass of the platform's options, which are keyword arguments of `start`.
        directory: The folder that the platform may write to.
        state: The state in which the run ended; None if the run has not ended or may go on.
        conventions: The platform's rules for names, and its words; the default takes every name.

    Args:
        directory: The folder that the platform may write to, created when it starts.
    """

    name: ClassVar[str]
    library: ClassVar[str]
    on_all_ranks: ClassVar[bool] = False
    joining_variables: ClassVar[tuple[str, ...]] = ()
    media_kinds: ClassVar[frozenset[MediaKind]] = frozenset()
    options_type: ClassVar[type[Any]] = NoOptions

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory).absolute()
        self._options: Options = self.options_type()
        self._given: Any = None  # the library's own object of a run, which the user made
        self._is_started = False
        self.state: RunState | None = "finished"
        self.conventions = CONVENTIONS.get(self.name, Conventions())
        own, told = self.conventions, set[str]()
        self._value_names = PlatformNames(self.name, own.values, told=told)
        self._media_names = PlatformNames(self.name, own.media or own.values, told=told)
        self._parameter_names = PlatformNames(
            self.name, own.parameters, told=told, separator=own.separator or "/"
        )
        self._file_names = PlatformNames(self.name, own.files, told=told)

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return a tracker that logs to the user's run, an object of the library; `finish` leaves the run open.

        Raises:
            ValueError: The platform cannot log to this run; the message says why.
        """
        tracker = cls(cls.directory_of(given))
        tracker._given = given
        return tracker

    @staticmethod
    def directory_of(given: Any) -> Path:
        """Return the folder of a user's run. A subclass refuses a run here that it cannot log to."""
        del given
        return Path()

    def check_library(self) -> None:
        """Check that the platform's library is installed, without importing it.

        Raises:
            MissingLibraryError: The library is not installed; the message names the extra that brings it.
        """
        if find_spec(self.library) is None:
            raise MissingLibraryError(_missing_library(self.library, self.name))

    def start(self, run_name: str, config: Metrics, **options: Any) -> None:
        """Start a run, or continue a stopped run of the same name. The options are the fields of `options_type`.

        Raises:
            TrackerStateError: It is started already.
            MissingLibraryError: The platform's library is not installed.
            TypeError: The platform has no such option.
            ValueError: An option is not one of the allowed values.
        """
        if self._is_started:
            raise TrackerStateError(f"{self.name}: start() again, while a run is open: finish() first")
        check_options(cast("Tracker", self), "start", options)
        self._options = self.options_type(**options)
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

    def named(self, records: Sequence[LoggedRecord]) -> list[LoggedRecord]:
        """Return records with the platform's names, and their values as one level; see `conventions`."""
        named: list[LoggedRecord] = []
        for record in records:
            media = {
                (self._file_names if one.kind == "artifact" else self._media_names).of(name): one
                for name, one in record.media.items()
            }
            named.append(replace(record, values=self._value_names.flat(record.values), media=media))
        return named

    def parameters(self, config: Mapping[str, Plain]) -> dict[str, Plain]:
        """Return a configuration with the platform's names, flattened if the platform takes no nested values."""
        if self.conventions.separator is not None:
            return dict(self._parameter_names.flat(config))
        return {self._parameter_names.of(name): value for name, value in config.items()}

    def file_name(self, name: str) -> str:
        """Return the platform's name for an artifact or a run's folder."""
        return self._file_names.of(name)

    def write(self, records: Sequence[LoggedRecord]) -> None:
        """Write records in order; once the call returns, a kill of this process loses none of the records.

        Raises:
            TrackerStateError: It is not started.
        """
        if not self._is_started:
            raise TrackerStateError(
                f"{self.name}: a value before start(): call start(run_name, config) first"
            )
        self.write_records(self.named(records))

    def finish(self) -> None:
        """Close the run as finished; do nothing if no run was started."""
        self.end("finished")

    def end(self, state: RunState | None) -> None:
        """End the run, if it is started; with None, release a run that may go on, if the platform can do so."""
        if self._is_started:
            self._is_started, self.state = False, state
            if self._given is None:
                self.close()

    @property
    def has_ended_early(self) -> bool:
        """True if the run has failed, or was killed."""
        return self.state in ("failed", "killed")

    @property
    def state_word(self) -> Any:
        """The platform's word for how the run ended; None if it may go on."""
        return None if self.state is None else self.conventions.states.get(self.state, self.state)

    @abstractmethod
    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Open the run, or the stopped run of this name in `directory`."""

    @abstractmethod
    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write records in order, and flush them out of this process."""

    @abstractmethod
    def close(self) -> None:
        """End the run, with `state_word`, and release the library. Never called for a user's own run."""

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Return how many of these records, counted from the first, the platform holds already.

        A forwarder passes the records that it was sending when a writer was killed, or a call failed. This default,
        0, makes it write all of them again, for platforms that cannot tell.
        """
        del records
        return 0

    def record_plan(self, plan: Metrics) -> None:
        """Keep the run's effective plan."""
        self.keep_document("plan", plan)

    def record_info(self, info: Metrics) -> None:
        """Keep the run's surroundings: commit, versions, hardware, command line."""
        self.keep_document("info", info)

    @abstractmethod
    def keep_document(self, name: str, document: Metrics) -> None:
        """Keep nested plain values beside the run's records; a document of the same name is replaced."""

    def run_id(self, run_name: str) -> str | None:
        """Return the platform's own id of a stopped run of this name, or None."""
        return read_json(self._ids_file).get(run_name)

    def remember_run_id(self, run_name: str, run_id: str) -> None:
        """Remember the platform's own id of a run, so that a later process continues it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        replace_text(self._ids_file, json.dumps({**read_json(self._ids_file), run_name: run_id}))

    @property
    def _ids_file(self) -> Path:
        return self.directory / f"{self.name}.runs.json"


def wait_for_text(path: Path, text: str, *, offset: int) -> None:
    """Wait until a library's thread or process has written a text to a file, after an offset."""
    # The 7 bytes that begin each block of a `.wandb` file may divide it.
    pattern = re.compile("(?:.{7})?".join(map(re.escape, text)).encode(), re.DOTALL)
    deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    added = b""
    with path.open("rb") as file:
        file.seek(offset)
        while pattern.search(added := added + file.read()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path}: no record reached the file in {_LONGEST_WAIT_SECONDS:g} s")
            time.sleep(_PAUSE_SECONDS)


def load_library(module: str, *, extra: str) -> ModuleType:
    """Import a platform's library."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the library is there, and lacks something itself
        raise MissingLibraryError(_missing_library(module.partition(".")[0], extra)) from None


def _missing_library(library: str, extra: str) -> str:
    """Return the error message for a library that is not installed."""
    return (
        f"the tracker {extra!r} needs the library {library!r}, which is not installed: "
        f"pip install 'drivetrain-tracking[{extra}]'"
    )
