"""ClearML: online where an access key is configured, else offline sessions for `Task.import_offline_session`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from drivetrain_tracking.platforms.compat import CLEARML_EVENTS, clearml_has_key, use_clearml_threads
from drivetrain_tracking.platforms.platform import Platform, load_library, wait_for_text
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import ALL_MEDIA, LoggedRecord, StoredMedium


@dataclass(frozen=True, kw_only=True)
class ClearMLOptions:
    """The options of a task of ClearML.

    Attributes:
        project: The name of the project.
        tags: Labels of the task.
        mode: If None, online where ClearML's environment or file holds an access key, else offline.
    """

    project: str = "drivetrain"
    tags: Sequence[str] = ()
    mode: Literal["online", "offline"] | None = None


class ClearMLTracker(Platform[ClearMLOptions]):
    """A tracker that writes a task of ClearML; a process can have one such task at a time.

    Numbers and booleans are scalars, `lr/head` the series "head" of the plot "lr"; strings are lines of the console;
    None is only in the log. ClearML would report 0 for a value that is not finite: the series "loss is NaN", "loss is
    Infinity" or "loss is -Infinity" is 1 at that step instead. A record without a step gets the last step.
    `drivetrain/time` holds each record's time. ClearML overwrites a step at its second report: repeated steps of a
    resumed run are the series "loss (attempt 2)".

    Offline, `write` returns once all values are in the session's file of events, which a kill does not change;
    online, once the server has all values. The sessions are where ClearML keeps them, `~/.clearml/cache/offline` or
    CLEARML_CACHE_DIR. A stopped run goes on in a further session: `Task.import_offline_session(folder)` imports the
    first, and with `previous_task_id=` the others into the same task. By default, a user's own task reports from a
    separate process every 5 seconds, and each `write` waits for it.
    """

    name = "clearml"
    library = "clearml"
    options_type = ClearMLOptions
    joining_variables = ("CLEARML_PROC_MASTER_ID",)
    media_kinds = ALL_MEDIA

    _task: Any
    _events: Path | None  # the file of an offline session
    _step: int = 0

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Create the task, or the task's next offline session."""
        library = load_library("clearml", extra=self.name)
        self._task = self._init(library, run_name) if self._given is None else self._given
        is_offline = library.Task.is_offline()
        self._events = Path(self._task.get_offline_mode_folder()) / CLEARML_EVENTS if is_offline else None
        self._task.connect(self.parameters(config))

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Report the values of each record, the time last, and wait until all have left this process."""
        logger, events = self._task.get_logger(), self._events
        written_before = events.stat().st_size if events is not None and events.exists() else 0
        for record in records:
            self._step = self._step if record.step is None else record.step
            for name, medium in record.media.items():
                self._report_medium(name, medium)
            for name, text in record.texts.items():
                logger.report_text(f"{name}: {text}", print_console=False)
            suffix = f" (attempt {record.attempt})" if record.attempt > 1 else ""
            for name, number in record.numbers.items():
                title, series = _place(name)
                if not math.isfinite(number):
                    told = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
                    series, number = f"{series} is {told}", 1.0
                logger.report_scalar(title, series + suffix, number, iteration=self._step)
            logger.report_scalar("drivetrain", "time", float(record.time), iteration=self._step)
        self._task.flush(wait_for_uploads=True)
        if events is not None and records:
            # The flush may return at the sign of a round of ClearML's thread from before these reports.
            wait_for_text(events, repr(float(records[-1].time)), offset=written_before)

    def keep_document(self, name: str, document: Metrics) -> None:
        """Keep a document as a configuration of the task."""
        self._task.connect_configuration(dict(document), name=name)

    def close(self) -> None:
        """Close the task; if the run has not finished, mark the task so at the server.

        An offline session stores the state as the last line of the console and as a configuration `state`.
        """
        if self.has_ended_early:
            self.keep_document("state", {"state": self.state_word})
            told = f"the run was not finished: {self.state}"
            self._task.get_logger().report_text(told, print_console=False)
        self._task.close()
        if self.has_ended_early and self._events is None:
            task = load_library("clearml", extra=self.name).Task.get_task(task_id=self._task.id)
            mark = task.mark_failed if self.state == "failed" else task.mark_stopped
            mark(force=True, status_message="the process ended before its training did")

    def _init(self, library: Any, run_name: str) -> Any:
        known = (self.run_id(run_name) or "").split()
        is_online = (self._options.mode or ("online" if clearml_has_key() else "offline")) == "online"
        library.Task.set_offline(not is_online)
        use_clearml_threads()
        task = library.Task.init(
            project_name=self._options.project,
            task_name=run_name,
            tags=list(self._options.tags),
            reuse_last_task_id=known[-1] if known and is_online else False,
            continue_last_task=0 if known and is_online else False,  # steps count from 0, not from the last
            auto_connect_arg_parser=False,
            auto_connect_frameworks={"detect_repository": False},
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        self.remember_run_id(run_name, " ".join(dict.fromkeys([*known, task.id])))
        return task

    def _report_medium(self, name: str, medium: StoredMedium) -> None:
        logger, data = self._task.get_logger(), medium.data
        content: Any = data
        place = dict(zip(("title", "series"), _place(name), strict=True), iteration=self._step)
        if medium.kind == "table":
            logger.report_table(**place, table_plot=[content["columns"], *content["rows"]])
        elif medium.kind == "histogram":
            edges = content["edges"]
            labels = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
            logger.report_histogram(**place, values=content["counts"], xlabels=labels)
        elif medium.kind == "text":
            logger.report_text(f"{name}: {content}", print_console=False)
        elif medium.kind in ("image", "figure"):
            logger.report_image(**place, local_path=str(medium.path))
        elif medium.kind in ("audio", "video"):
            logger.report_media(**place, local_path=str(medium.path))
        else:
            self._task.upload_artifact(name, artifact_object=str(medium.path), wait_on_upload=True)


def _place(name: str) -> tuple[str, str]:
    """Return the plot and the series of a name: "lr/head" is the series "head" of the plot "lr"."""
    title, _, series = name.partition("/")
    return title, series or title
