"""SwanLab: runs in `DIRECTORY/swanlog`, which `swanlab sync` sends to its server, or online at once."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

from drivetrain_tracking.platforms import compat
from drivetrain_tracking.platforms.library import load_library
from drivetrain_tracking.platforms.platform import Platform
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium, flat_numbers, flat_texts

_INTERNAL = "swanlab.sdk.internal"


@dataclass(frozen=True, kw_only=True)
class SwanLabOptions:
    """The options of a run of SwanLab.

    Attributes:
        mode: The place that values go to. By default online if SwanLab finds a key (`swanlab login`,
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

    Numbers and booleans are scalars with the record's time, NaN and infinities among them; strings are texts; None is
    left to the log. A record without a step gets the step after the last. Steps that a resumed run logs again are
    `attempt-2/NAME`. SwanLab keeps one value for a name and a step: a second one is `NAME (2)`, and so is a value of
    another type under the same name.

    Each start writes to a folder of its own, with the id of the first. SwanLab keeps values in the process until it
    closes a file; `write` has its thread flush the file, so a kill takes nothing back.
    """

    name = "swanlab"
    library = "swanlab"
    options_type = SwanLabOptions
    media_kinds = frozenset({"image", "figure", "video", "table", "histogram", "text", "artifact"})

    def __init__(self, directory: Path | str) -> None:
        super().__init__(directory)
        self._run: Any = None
        self._held: dict[int, list[str]] = {}  # time in nanoseconds -> names that the last count found
        self._step: int | None = None  # the last one; None where the files must be read for it

    @staticmethod
    def directory_of(given: Any) -> Path:
        """Return the folder of a `swanlab.Run` of the user's."""
        return Path(given.dir).parent.parent

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Open a run with the id of the stopped one, if there is one."""
        self._run = self._given or self._open(run_name)
        self._run.config.update(self.parameters(config))
        self._step, self._held = None, {}
        self._flush()

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Hand each record to SwanLab's thread, then wait until that has flushed its file."""
        if self._run.mode == "disabled":
            return
        events = load_library(f"{_INTERNAL}.bus.events", extra=self.name)
        taken: dict[str, tuple[int, set[int]]] = {}  # by name, in this call: its type and steps
        for record in records:
            step = self._step = self._next_step() if record.step is None else record.step
            held = self._held.get(_nanoseconds(record.time), [])
            entries: dict[str, Any] = {}
            for name, value in self._entries(record):
                if not any(_is_of(name, one) for one in held):
                    entries[self._free_key(name, value, step, taken)] = value
            event = events.MetricLogEvent(data=entries, step=step, timestamp=_timestamp(record.time))
            compat.swanlab_emit(self._run, event)
            for name, medium in record.media.items():
                if medium.kind == "artifact" and medium.path is not None:
                    self._save(f"{name}-{record.attempt}-{step}", medium.path)
        self._flush()

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Count the records all of whose values are in the run's files."""
        if self._run.mode == "disabled":
            return len(records)
        wanted = {
            _nanoseconds(record.time): [name for name, _ in self._entries(record)]
            for record in self.named(records)
        }
        held: defaultdict[int, list[str]] = defaultdict(list)
        for entry in self._stored():
            if (time := entry.timestamp.ToNanoseconds()) in wanted:
                held[time].append(entry.key)
        self._held = dict(held)
        whole = [len(held[time]) >= len(names) for time, names in wanted.items()]
        return whole.index(False) if False in whole else len(whole)

    def keep_document(self, name: str, document: Metrics) -> None:
        """Keep a document as a section of the configuration."""
        self._run.config[name] = dict(document)

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        if self._given is None:
            compat.swanlab_stop_watching(run)
            with compat.swanlab_quiet(load_library(f"{_INTERNAL}.pkg.console", extra=self.name)):
                words = {"crashed": {"error": "the process ended before its training did"}}
                run.finish(state=self.state_word or "success", **words.get(self.state_word, {}))

    def _open(self, run_name: str) -> Any:
        library = load_library("swanlab", extra=self.name)
        run_id = (
            self.run_id(run_name) or load_library("swanlab.utils.experiment", extra=self.name).generate_id()
        )
        self.remember_run_id(run_name, run_id)
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
        with compat.swanlab_quiet(load_library(f"{_INTERNAL}.pkg.console", extra=self.name)):
            return library.init(name=run_name, id=run_id, resume="allow", settings=own, **options)

    def _flush(self) -> None:
        if self._run.mode == "disabled":
            return
        events = load_library(f"{_INTERNAL}.bus.events", extra=self.name)
        flush = compat.SwanLabFlush(self._run)
        compat.swanlab_emit(self._run, events.MetricLogEvent(data=flush, step=0, timestamp=_timestamp(0.0)))
        flush.wait()

    def _stored(self) -> Iterator[Any]:
        """Yield the scalars and media in the files of all starts, up to where a kill cut each one short."""
        store = load_library(f"{_INTERNAL}.core_python.store", extra=self.name)
        records = load_library("swanlab.proto.swanlab.record.v1.record_pb2", extra=self.name)
        for file in sorted(self._run.dir.parent.glob(f"*/run-{self._run.id}.swanlab")):
            if file.stat().st_size < store.LEVELDBLOG_HEADER_LEN:
                continue
            reader = store.DataStoreReader()
            reader.open(file)
            for line in reader:
                record = records.Record.FromString(line)
                if (kind := record.WhichOneof("record_type")) in ("scalar", "media"):
                    yield getattr(record, kind)
            reader.close()

    def _next_step(self) -> int:
        last = max((entry.step for entry in self._stored()), default=-1) if self._step is None else self._step
        return last + 1

    def _entries(self, record: LoggedRecord) -> Iterator[tuple[str, Any]]:
        """Yield what a record becomes in SwanLab, by name."""
        above = "" if record.attempt == 1 else f"attempt-{record.attempt}/"
        library = load_library("swanlab", extra=self.name)
        for name, number in flat_numbers(record.values).items():
            yield above + name, number
        for name, text in flat_texts(record.values).items():
            yield above + name, library.Text(text)
        for name, medium in record.media.items():
            if medium.kind != "artifact":
                yield above + name, self._medium(medium)

    def _free_key(self, name: str, value: Any, step: int, taken: dict[str, tuple[int, set[int]]]) -> str:
        """Return the name, with a number if SwanLab would drop the value under it, and note it as taken."""
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
        match medium.kind:
            case "table":
                return library.ECharts(
                    library.echarts.Table().add(data["columns"], data["rows"]), caption=caption
                )
            case "histogram":
                bars = library.echarts.Bar().add_xaxis([f"{edge:.6g}" for edge in data["edges"][:-1]])
                return library.ECharts(bars.add_yaxis("count", data["counts"]), caption=caption)
            case "text":
                return library.Text(data, caption=caption)
            case "video":
                return library.Video(str(medium.path), caption=caption)
            case _:
                return library.Image(str(medium.path), caption=caption)

    def _save(self, name: str, path: Path) -> None:
        events = load_library(f"{_INTERNAL}.bus.events", extra=self.name)
        event = events.FileSaveEvent(source_path=str(path), name=f"{name}{path.suffix}", policy="now")
        compat.swanlab_emit(self._run, event)


def chosen_mode(asked: str | None, configured: str, *, has_key: bool) -> str:
    """Return the mode of a run: what is asked, else what SwanLab's settings say, but never online without a key."""
    return asked or ("offline" if configured == "online" and not has_key else configured)


def _is_of(name: str, stored: str) -> bool:
    """Return whether a stored name is the one that a value has, or the one with a number that it got instead."""
    return stored == name or (stored.startswith(f"{name} (") and stored.endswith(")"))


def _nanoseconds(time: float) -> int:
    """Return a time in whole nanoseconds; a float of these years has steps of 240."""
    return _timestamp(time).ToNanoseconds()


def _timestamp(time: float) -> Any:
    stamp = load_library("google.protobuf.timestamp_pb2", extra="swanlab").Timestamp()
    stamp.FromNanoseconds(round(time * 1_000_000_000))
    return stamp
