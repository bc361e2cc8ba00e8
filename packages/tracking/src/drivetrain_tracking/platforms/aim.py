"""Aim: runs in the repository `DIRECTORY/.aim`, which `aim up --repo DIRECTORY` shows, or on an Aim server."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain_tracking.platforms import compat
from drivetrain_tracking.platforms.platform import Platform, load_library
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium

_MARK = "drivetrain"  # the run's attribute with the time and step of the last record, and how it ended


@dataclass(frozen=True, kw_only=True)
class AimOptions:
    """The options of a run of Aim.

    Attributes:
        repo: The folder of the repository, or a server, `aim://HOST:PORT`; the tracker's directory by default.
        experiment: The experiment that the run belongs to.
        tags: The tags of the run.
        force_resume: True to break the lock that a killed process left. Aim breaks the lock itself if it sees that
            the process is gone; it cannot see this on another machine, or if another process has the same number now.
    """

    repo: str | None = None
    experiment: str | None = None
    tags: Sequence[str] = ()
    force_resume: bool = False


class AimTracker(Platform[AimOptions]):
    """A tracker that writes to an Aim repository.

    Numbers and booleans are metrics, strings are texts, NaN and infinities are kept; None is only in the log. A
    record without a step gets the step after the last. Steps that a resumed run logs again are in the context
    `{"attempt": 2}`, since Aim keeps one value for a name, context and step.

    RocksDB hands each value to the operating system at once, so a kill takes nothing back. A record that a kill cut
    short is written again in full. Queries (`Repo.query_metrics`, `Repo.iter_runs`) read an index that `aim up`
    fills; `finish` adds the run to the index, so that queries find the run without a server.
    """

    name = "aim"
    library = "aim"
    options_type = AimOptions
    media_kinds = frozenset({"image", "figure", "audio", "histogram", "text", "artifact"})

    _run: Any
    _step: int

    @staticmethod
    def directory_of(given: Any) -> Path:
        """Return the repository of the user's `aim.Run`."""
        return Path(given.repo.root_path)

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Open the run in write mode, and note its configuration."""
        self._run = self._given or self._open(run_name)
        for tag in self._options.tags:
            self._run.add_tag(tag)
        self._run["hparams"] = dict(config)
        self._step = int(self._mark().get("step", -1))

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write each value on this thread, then note the time of the last record."""
        for record in records:
            self._step = self._step + 1 if record.step is None else record.step
            for name, value in record.numbers.items():
                self._track(record, name, value)
            for name, text in record.texts.items():
                self._track(record, name, load_library("aim", extra=self.name).Text(text))
            for name, medium in record.media.items():
                self._add_medium(record, name, medium)
        if records:
            self._run[_MARK] = {"time": records[-1].time, "step": self._step, "state": "running"}
            compat.aim_wait_for_server(self._run.repo)

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Count the records up to the time that the run notes."""
        last = self._mark().get("time", -math.inf)
        return sum(record.time <= last for record in records)

    def keep_document(self, name: str, document: Metrics) -> None:
        """Set a document as an attribute of the run."""
        self._run[name] = dict(document)

    def close(self) -> None:
        """Close the run, and add it to the index."""
        run, self._run = self._run, None
        if self.state is not None:  # Aim itself knows running and ended alone
            run[_MARK] = {**run.get(_MARK, {}), "state": self.state_word}
        run.close()
        if not run.repo.is_remote_repo:
            errors = load_library("aimrocks.errors", extra=self.name)
            with suppress(errors.RocksIOError):  # a running `aim up` holds the index, and adds the run itself
                compat.aim_add_to_index(run)

    def _open(self, run_name: str) -> Any:
        library = load_library("aim", extra=self.name)
        place = self._options.repo or str(self.directory)
        is_folder = "://" not in place
        repo = library.Repo.from_path(place, init=is_folder and not library.Repo.exists(place))
        compat.aim_forget_runs(repo)
        known = self.run_id(run_name)
        run = library.Run(
            known if known is not None and repo.run_exists(known) else None,
            repo=repo,
            experiment=self._options.experiment,
            force_resume=self._options.force_resume,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        run.name = run_name
        self.remember_run_id(run_name, run.hash)
        return run

    def _mark(self) -> Mapping[str, Any]:
        return self._run.get(_MARK, {})

    def _track(self, record: LoggedRecord, name: str, value: object) -> None:
        context = {} if record.attempt == 1 else {"attempt": record.attempt}
        for taken in (name, f"{name}.{type(value).__name__.lower()}"):
            try:
                compat.aim_track(
                    self._run, value, time=record.time, name=taken, step=self._step, context=context
                )
                return
            except ValueError:  # Aim keeps values of one type under a name: others get the type's name too
                if taken != name:
                    raise

    def _add_medium(self, record: LoggedRecord, name: str, medium: StoredMedium) -> None:
        library = load_library("aim", extra=self.name)
        if medium.kind in ("image", "figure"):
            self._track(record, name, library.Image(str(medium.path), caption=medium.caption))
        elif medium.kind == "audio" and medium.path is not None:
            kind = medium.path.suffix[1:]
            self._track(record, name, library.Audio(str(medium.path), format=kind, caption=medium.caption))
        elif medium.kind == "histogram":
            self._track(record, name, self._distribution(medium))
        elif medium.kind == "text":
            self._track(record, name, library.Text(str(medium.data)))
        elif medium.kind == "artifact" and medium.path is not None:
            if self._run.artifacts_uri is None:
                self._run.set_artifacts_uri((self.directory / "aim-artifacts").as_uri())
            suffix = medium.path.suffix
            at = f"{self._step}" if record.attempt == 1 else f"attempt-{record.attempt}-{self._step}"
            self._run.log_artifact(str(medium.path), f"{name}-{at}{suffix}", block=True)

    def _distribution(self, medium: StoredMedium) -> Any:
        """Return a histogram with bins of equal width, as Aim needs; other bins count at their centre."""
        numpy = load_library("numpy", extra=self.name)
        assert isinstance(medium.data, dict)
        edges, counts = numpy.asarray(medium.data["edges"]), numpy.asarray(medium.data["counts"])
        if not numpy.allclose(numpy.diff(edges), edges[1] - edges[0]):
            centres = (edges[1:] + edges[:-1]) / 2
            counts, edges = numpy.histogram(
                centres, bins=len(counts), range=(edges[0], edges[-1]), weights=counts
            )
        library = load_library("aim", extra=self.name)
        return library.Distribution.from_histogram(counts, (float(edges[0]), float(edges[-1])))
