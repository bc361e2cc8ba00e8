"""Trackio: rows of its local SQLite database, which `trackio show --project PROJECT` displays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from drivetrain_tracking.platforms import compat
from drivetrain_tracking.platforms.platform import Platform, load_library
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import ALL_MEDIA, LoggedRecord, StoredMedium

_MOST_IDS = 500  # in one question to SQLite


@dataclass(frozen=True, kw_only=True)
class TrackioOptions:
    """The options of a run of Trackio.

    Attributes:
        project: The project, which is one database of Trackio.
        group: The group of the run in the dashboard.
    """

    project: str = "drivetrain"
    group: str | None = None


class TrackioTracker(Platform[TrackioOptions]):
    """A tracker that writes Trackio's database, where Trackio keeps it: `TRACKIO_DIR`, or its folder in the home.

    Each record is a row with its time and step; a record without a step gets the step after the last. Strings,
    booleans, None, NaN and infinities are kept. Steps that a resumed run logs again are the run
    `NAME (attempt 2)`.

    A call of `write` is one transaction of SQLite, and an existing row is not written twice: a kill neither loses nor
    repeats rows. The configuration is stored with the first record after the start, since Trackio cannot store it for
    an empty run. To send a run to a Space, call `trackio.sync` after the run.
    """

    name = "trackio"
    library = "trackio"
    options_type = TrackioOptions
    media_kinds = ALL_MEDIA

    _project: str
    _run_name: str
    _run_id: str
    _config: dict[str, Plain]
    _attempts: set[int]  # whose configuration is written

    @staticmethod
    def directory_of(given: Any) -> Path:
        """Return the working folder.

        Raises:
            ValueError: The run goes to a Space or a server, which take no rows with times of their own.
        """
        if not compat.trackio_is_local(given):
            raise ValueError(
                f"the Trackio run {given.name!r} goes to {given.url}; a tracker needs a run of the local database: "
                "trackio.init() without space_id and server_url, then trackio.sync(project, space_id)"
            )
        return Path.cwd()

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Open the project's database."""
        storage, given = self._storage(), self._given
        if given is not None:
            self._project, self._run_name, self._run_id = given.project, given.name, given.id
            own = given.config
        else:
            self._project = self._options.project
            storage.validate_project_name(self._project)
            self._run_name, self._run_id = run_name, self.run_id(run_name) or uuid4().hex
            own = {"_Created": datetime.now(UTC).isoformat(), "_Group": self._options.group}
            self.remember_run_id(run_name, self._run_id)
        self._config = {**self.parameters(config), **own}
        known = storage.get_run_config(self._project, run_id=self._run_id) or {}
        if "_Created" in known:
            self._config["_Created"] = known["_Created"]
        self._attempts = set()

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write the records of each attempt in one transaction."""
        for attempt in sorted({record.attempt for record in records}):
            rows = [record for record in records if record.attempt == attempt]
            self._storage().bulk_log(
                self._project,
                self._name_of(attempt),
                [self._row(record) for record in rows],
                steps=[record.step for record in rows],
                timestamps=[
                    datetime.fromtimestamp(record.time, UTC).isoformat(timespec="microseconds")
                    for record in rows
                ],
                config=None if attempt in self._attempts else self._config,
                log_ids=[self._log_id(record) for record in rows],
                run_id=self._id_of(attempt),
            )
            self._attempts.add(attempt)

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Count the records that have a row."""
        wanted, held = [self._log_id(record) for record in records], set[str]()
        storage = self._storage()
        if not storage.get_project_db_path(self._project).exists():
            return 0
        # Trackio makes the table of metrics first, then adds the column of ids: a kill between the two leaves a table
        # without ids, which Trackio adds when it writes next.
        tables = storage.query_project(
            self._project,
            "SELECT name FROM sqlite_master "
            "WHERE type = 'table' AND name = 'metrics' AND instr(sql, 'log_id') > 0",
        )
        if not tables["rows"]:
            return 0
        for first in range(0, len(wanted), _MOST_IDS):
            some = ", ".join(f"'{one}'" for one in wanted[first : first + _MOST_IDS])
            query = f"SELECT log_id FROM metrics WHERE log_id IN ({some})"
            held |= {row["log_id"] for row in storage.query_project(self._project, query)["rows"]}
        return next((at for at, one in enumerate(wanted) if one not in held), len(wanted))

    def keep_document(self, name: str, document: Metrics) -> None:
        """Keep a document as a section of the configuration."""
        self._config[name] = dict(document)
        self._attempts = set()

    def close(self) -> None:
        """Write a state other than "finished" as a row, and to the configuration until the next record.

        Trackio has no states, and keeps nothing of a run open.
        """
        if self.has_ended_early:
            self._storage().bulk_log(
                self._project,
                self._run_name,
                [{"drivetrain/state": self.state_word}],
                config={**self._config, "state": self.state_word},
                run_id=self._run_id,
            )

    def _storage(self) -> Any:
        return load_library("trackio.sqlite_storage", extra=self.name).SQLiteStorage

    def _name_of(self, attempt: int) -> str:
        return self._run_name if attempt == 1 else f"{self._run_name} (attempt {attempt})"

    def _id_of(self, attempt: int) -> str:
        return self._run_id if attempt == 1 else f"{self._run_id}-attempt-{attempt}"

    def _log_id(self, record: LoggedRecord) -> str:
        return f"{self._run_id}-{record.attempt}-{float(record.time).hex()}"

    def _row(self, record: LoggedRecord) -> dict[str, Any]:
        row: dict[str, Any] = dict(record.values)
        for name, medium in record.media.items():
            if medium.kind == "artifact":
                self._add_artifact(record, name, medium)
            else:
                row[name] = compat.trackio_medium(
                    self._medium(medium),
                    project=self._project,
                    run=self.file_name(self._name_of(record.attempt)),  # a folder's name there
                    step=record.step or 0,
                )
        return row

    def _medium(self, medium: StoredMedium) -> Any:
        library: Any = load_library("trackio", extra=self.name)
        data: Any = medium.data
        if medium.kind == "table":
            return library.Table(columns=data["columns"], data=data["rows"])
        if medium.kind == "histogram":
            return library.Histogram(np_histogram=(data["counts"], data["edges"]))
        if medium.kind == "text":
            return library.Markdown(data)
        kinds = {"audio": library.Audio, "video": library.Video}
        return kinds.get(medium.kind, library.Image)(str(medium.path), caption=medium.caption)

    def _add_artifact(self, record: LoggedRecord, name: str, medium: StoredMedium) -> None:
        """Add a version of an artifact, unless the same content is stored already."""
        library = load_library("trackio", extra=self.name)
        run = self.file_name(self._name_of(record.attempt))
        artifact = library.Artifact(f"{run}-{name}", type="file")
        artifact.add_file(str(medium.path))
        self._storage().commit_artifact_version(
            project=self._project,
            name=artifact.name,
            type=artifact.type,
            description=medium.caption or None,
            manifest=compat.trackio_manifest(artifact, self._project),
            metadata={},
            aliases=None,
            run_name=self._name_of(record.attempt),
            run_id=self._id_of(record.attempt),
        )
