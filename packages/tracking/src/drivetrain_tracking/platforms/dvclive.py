"""DVCLive: tables, parameters and images in `DIRECTORY/dvclive/RUN`, which DVC and its editor extension show."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from drivetrain_tracking.platforms import compat
from drivetrain_tracking.platforms.platform import Platform, load_library
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.spool.files import read_json, replace_text
from drivetrain_tracking.values.plain import Plain, mark_of
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium

# In the run's folder: the last record's time, and how long each table was after it.
_STATE = ".drivetrain.json"


@dataclass(frozen=True, kw_only=True)
class DVCLiveOptions:
    """The options of a run of DVCLive.

    Attributes:
        dvcyaml: The path of the `dvc.yaml` to write; one in the run's folder by default.
        save_experiment: True to save the run, when it ends, as an experiment of DVC with the run's name; needs a Git
            repository.
        report: The kind of report in the run's folder, which DVCLive rewrites at each `write`.
    """

    dvcyaml: str | None = None
    save_experiment: bool = False
    report: Literal["md", "html"] | None = None


class DVCLiveTracker(Platform[DVCLiveOptions]):
    """A tracker that writes DVCLive's files.

    Numbers and strings are rows of `plots/metrics/NAME.tsv`, true and false are 1 and 0, NaN and infinities are the
    words `nan` and `inf`; None is only in the log. A record without a step gets the last step. Steps that a resumed
    run logs again go to `attempt-2/NAME`. If a name is a folder of another name in DVC's summary (`loss` and
    `loss/val`), dots replace its slashes.

    DVCLive closes a table after each row, so a kill loses no rows. The next tracker cuts off the unfinished rows of a
    killed `write` when it starts.
    """

    name = "dvclive"
    library = "dvclive"
    options_type = DVCLiveOptions
    media_kinds = frozenset({"image", "figure", "histogram"})

    _live: Any
    _names: dict[str, str]  # as logged -> DVCLive's
    _num_listed: int = 0  # names that dvc.yaml was written for

    @staticmethod
    def directory_of(given: Any) -> Path:
        """Return the folder of the user's `dvclive.Live`.

        Unfinished rows of a killed process stay there, since they may hold other values than the tracker's.
        """
        return Path(given.dir).absolute()

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Open the run's folder, and write its parameters."""
        self._live = self._given or self._open(run_name)
        state = self._state()
        self._names = dict(state.get("names", {}))
        self._live.log_params(self.parameters(config))

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write a row for each value, note the sizes of the tables, and update DVC's summary."""
        for record in records:
            if record.step is not None:
                self._live.step = record.step
            for name, value in record.values.items():
                if value is None:
                    continue
                at = record.attempt_prefix + name
                if at not in self._names:
                    self._names[at] = free_name(at, frozenset(self._names.values()))
                self._live.log_metric(self._names[at], int(value) if isinstance(value, bool) else value)
            for name, medium in record.media.items():
                self._add_medium(record, name, medium)
        if records:
            self._note(records[-1].time)
            if compat.dvclive_sends_to_studio(self._live):
                self._live.sync()
                return
            self._live.make_summary()
            self._live.make_report()
            if self._given is None and self._num_listed != len(self._names):
                self._num_listed = len(self._names)
                self._list(self._live)

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Count the records up to the time that was noted last."""
        last = self._state().get("time", -math.inf)
        return sum(record.time <= last for record in records)

    def keep_document(self, name: str, document: Metrics) -> None:
        """Write a document as a parameter."""
        self._live.log_param(name, dict(document))

    def close(self) -> None:
        """End the run."""
        live, self._live = self._live, None
        if self.has_ended_early:
            live.log_param("state", self.state_word)
        if self._options.save_experiment or compat.dvclive_sends_to_studio(live):
            live.end()
            return
        live.make_summary()  # `end` does the same, and leaves a thread behind that waits for Studio
        self._list(live)
        live.make_report()

    def _open(self, run_name: str) -> Any:
        library = load_library("dvclive", extra=self.name)
        folder = self.directory / self.name / self.file_name(run_name)
        folder.mkdir(parents=True, exist_ok=True)
        state = read_json(folder / _STATE)
        _cut(folder, cast("Mapping[str, int]", state.get("sizes", {})))
        live = library.Live(
            str(folder),
            resume=True,
            report=self._options.report,
            save_dvc_exp=self._options.save_experiment,
            dvcyaml=self._options.dvcyaml or str(folder / "dvc.yaml"),
            exp_name=run_name if self._options.save_experiment else None,
        )
        live.summary = dict(state.get("summary", {}))
        live.step = int(state.get("step", 0))
        return live

    def _list(self, live: Any) -> None:
        """List the files for DVC to show in dvc.yaml. DVCLive removes no entries from one in the run's folder."""
        if self._options.dvcyaml is None:
            Path(live.dvc_file).unlink(missing_ok=True)
        live.make_dvcyaml()

    def _state(self) -> dict[str, Any]:
        return read_json(Path(self._live.dir) / _STATE)

    def _note(self, time: float) -> None:
        """Note the time of the last record and the sizes of the tables, by a rename that a kill cannot cut short."""
        folder = Path(self._live.dir)
        tables = {name: folder / "plots" / "metrics" / f"{name}.tsv" for name in set(self._names.values())}
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in tables.values()}
        noted = {"time": time, "step": self._live.step, "sizes": sizes, "names": self._names}
        replace_text(folder / _STATE, json.dumps({**noted, "summary": self._live.summary}))

    def _add_medium(self, record: LoggedRecord, name: str, medium: StoredMedium) -> None:
        at = f"{record.attempt_prefix}{name}/{self._live.step}"
        if medium.kind in ("image", "figure") and medium.path is not None:
            self._live.log_image(f"{at}{medium.path.suffix}", str(medium.path))
        elif medium.kind == "histogram":
            assert isinstance(medium.data, dict)
            edges = cast("list[float]", medium.data["edges"])
            counts = cast("list[float]", medium.data["counts"])
            rows = [{"from": edge, "count": count} for edge, count in zip(edges, counts, strict=False)]
            self._live.log_plot(at, rows, x="from", y="count", title=name)


def free_name(name: str, taken: frozenset[str]) -> str:
    """Return a name for files that differs from taken names and from their folders in DVC's summary."""
    # Names that differ in upper and lower case alone would be one file on some disks.
    folded = {one.casefold() for one in taken}

    def is_free(one: str) -> bool:
        own = one.casefold()
        above = {str(parent) for parent in PurePosixPath(own).parents[:-1]}
        return not (own in folded or above & folded or any(other.startswith(f"{own}/") for other in folded))

    dotted = name.replace("/", ".")
    return next(one for one in (name, dotted, f"{name}.value", f"{dotted}-{mark_of(name)}") if is_free(one))


def _cut(folder: Path, sizes: Mapping[str, int]) -> None:
    """Cut tables to their sizes after the last complete `write`, and remove files that a kill may have cut short."""
    for table in sorted(folder.glob("plots/metrics/**/*.tsv")):
        size = sizes.get(str(table.relative_to(folder)), 0)
        if size == 0:
            table.unlink()
        elif table.stat().st_size > size:
            with table.open("r+b") as file:
                file.truncate(size)
    for name in ("metrics.json", "params.yaml", "dvc.yaml"):  # written again from what is known
        (folder / name).unlink(missing_ok=True)
