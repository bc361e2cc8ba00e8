"""SwanLab: runs in `DIRECTORY/swanlog`, which `swanlab sync` sends to its server, or online at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

from drivetrain_tracking.platforms import compat
from drivetrain_tracking.platforms.platform import Platform, load_library
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium

_EVENTS = "swanlab.sdk.internal.bus.events"


@dataclass(frozen=True, kw_only=True)
class SwanLabOptions:
    """The options of a run of SwanLab.

    Attributes:
        mode: The destination of values. By default online if SwanLab finds a key (`swanlab login`,
            `SWANLAB_API_KEY`), else offline. SwanLab's own `SWANLAB_MODE` counts too.
        project: The project; the name of the current folder by default.
        workspace: The workspace on the server.
        group: The group of runs that this one belongs to.
        tags: The tags of the run.
        description: A description of the run.
    """

    mode: Literal["online", "offline", "local"] | None = None
    project: str | None = None
    workspace: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    description: str | None = None


class SwanLabTracker(Platform[SwanLabOptions]):
    """A tracker that writes SwanLab's files, offline unless a key of its server is configured.

    Numbers and booleans are scalars with the record's time, including NaN and infinities; strings are texts; None is
    only in the log. A record without a step gets the step after the last. Steps that a resumed run logs again are
    `attempt-2/NAME`. SwanLab keeps one value for a name and a step: a second value goes to `NAME (2)`, and so does a
    value of another type.

    Each start writes to a new folder, with the id of the first start. SwanLab keeps values in the process until it
    closes a file; `write` makes SwanLab's thread flush the file, so a kill loses nothing.
    """

    name = "swanlab"
    library = "swanlab"
    options_type = SwanLabOptions
    media_kinds = frozenset({"image", "figure", "video", "table", "histogram", "text", "artifact"})

    _run: Any
    _run_name: str
    _step: int = -1

    @staticmethod
    def directory_of(given: Any) -> Path:
        """Return the folder of the user's `swanlab.Run`."""
        return Path(given.dir).parent.parent

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Open a run; if a run of this name was stopped, use the stopped run's id."""
        self._run = self._given or self._open(run_name)
        self._run.config.update(self.parameters(config))
        self._flush()

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Pass each record to SwanLab's thread, then wait until the thread has flushed its file."""
        if self._run.mode == "disabled":
            return
        events = load_library(_EVENTS, extra=self.name)
        taken: dict[str, tuple[int, set[int]]] = {}  # by name, in this call: its type and steps
        for record in records:
            step = self._step = self._step + 1 if record.step is None else record.step
            entries = {
                self._free_key(name, value, step, taken): value for name, value in self._entries(record)
            }
            event = events.MetricLogEvent(data=entries, step=step, timestamp=_timestamp(record.time))
            compat.swanlab_emit(self._run, event)
            for name, medium in record.media.items():
                if medium.kind == "artifact" and medium.path is not None:
                    saved_as = f"{name}-{record.attempt}-{step}{medium.path.suffix}"
                    event = events.FileSaveEvent(source_path=str(medium.path), name=saved_as, policy="now")
                    compat.swanlab_emit(self._run, event)
        self._flush()
        if self._given is None:  # a record without a step follows the last one, after a restart too
            self.remember_run_id(self._run_name, f"{self._run.id} {self._step}")

    def keep_document(self, name: str, document: Metrics) -> None:
        """Keep a document as a section of the configuration."""
        self._run.config[name] = dict(document)

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        compat.swanlab_stop_watching(run)
        with compat.swanlab_quiet():
            words = {"crashed": {"error": "the process ended before its training did"}}
            run.finish(state=self.state_word or "success", **words.get(self.state_word, {}))

    def _open(self, run_name: str) -> Any:
        library = load_library("swanlab", extra=self.name)
        known_id, _, step = (self.run_id(run_name) or "").partition(" ")
        run_id = known_id or load_library("swanlab.utils.experiment", extra=self.name).generate_id()
        self._run_name, self._step = run_name, int(step or -1)
        settings, options = library.Settings(), asdict(self._options)
        options["mode"] = chosen_mode(options["mode"], settings.mode, has_key=settings.api_key is not None)
        options["tags"] = list(options["tags"]) or None
        probe = dict.fromkeys(("hardware", "runtime", "requirements", "git", "swanlab", "monitor"), False)
        own = library.Settings(
            interactive=False,
            log_dir=self.directory / "swanlog",
            terminal=library.Settings.Terminal(proxy_type="none"),
            probe=library.Settings.Probe(**probe),
            # SwanLab's own names have no fractions of a second, and a second start within one waits for the next.
            run=library.Settings.Run(dir=f"run-{datetime.now():%Y%m%d_%H%M%S_%f}-{run_id}"),
        )
        self.remember_run_id(run_name, f"{run_id} {self._step}")
        with compat.swanlab_quiet():
            return library.init(name=run_name, id=run_id, resume="allow", settings=own, **options)

    def _flush(self) -> None:
        if self._run.mode == "disabled":
            return
        events = load_library(_EVENTS, extra=self.name)
        flush = compat.SwanLabFlush(self._run)
        compat.swanlab_emit(self._run, events.MetricLogEvent(data=flush, step=0, timestamp=_timestamp(0.0)))
        flush.wait()

    def _entries(self, record: LoggedRecord) -> Iterator[tuple[str, Any]]:
        """Yield SwanLab's values of a record, by name."""
        library = load_library("swanlab", extra=self.name)
        for name, number in record.numbers.items():
            yield record.attempt_prefix + name, number
        for name, text in record.texts.items():
            yield record.attempt_prefix + name, library.Text(text)
        for name, medium in record.media.items():
            if medium.kind != "artifact":
                yield record.attempt_prefix + name, self._medium(medium)

    def _free_key(self, name: str, value: Any, step: int, taken: dict[str, tuple[int, set[int]]]) -> str:
        """Return the name as a key, numbered if SwanLab would drop the value otherwise; note the key as taken."""
        kinds = load_library("swanlab.proto.swanlab.metric.column.v1.column_pb2", extra=self.name).ColumnType
        kind = kinds.COLUMN_TYPE_SCALAR if isinstance(value, float) else value.column_type()
        for key in (name if n == 1 else f"{name} ({n})" for n in count(1)):
            own, steps = taken.get(key, (kind, set[int]()))
            is_free = own == kind and step not in steps
            if is_free and compat.swanlab_takes(self._run, key, step=step, column_type=kind):
                steps.add(step)
                taken[key] = kind, steps
                return key
        raise AssertionError("there is always another number")

    def _medium(self, medium: StoredMedium) -> Any:
        library: Any = load_library("swanlab", extra=self.name)
        data: Any = medium.data
        caption = medium.caption or None
        if medium.kind == "table":
            table = library.echarts.Table().add(data["columns"], data["rows"])
            return library.ECharts(table, caption=caption)
        if medium.kind == "histogram":
            bars = library.echarts.Bar().add_xaxis([f"{edge:.6g}" for edge in data["edges"][:-1]])
            return library.ECharts(bars.add_yaxis("count", data["counts"]), caption=caption)
        if medium.kind == "text":
            return library.Text(data, caption=caption)
        kind = library.Video if medium.kind == "video" else library.Image
        return kind(str(medium.path), caption=caption)


def chosen_mode(asked: str | None, configured: str, *, has_key: bool) -> str:
    """Return the mode of a run: the user's choice, else SwanLab's setting, but never online without a key."""
    return asked or ("offline" if configured == "online" and not has_key else configured)


def _timestamp(time: float) -> Any:
    stamp = load_library("google.protobuf.timestamp_pb2", extra="swanlab").Timestamp()
    stamp.FromNanoseconds(round(time * 1_000_000_000))
    return stamp
