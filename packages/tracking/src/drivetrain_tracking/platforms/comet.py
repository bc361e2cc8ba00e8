"""Comet: online where an API key is configured, else archives in `DIRECTORY/comet` for `comet upload`."""

import json
import logging
import shutil
import tempfile
import zipfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drivetrain_tracking.platforms.compat import COMET_MESSAGES, write_comet_head
from drivetrain_tracking.platforms.platform import Platform, load_library, wait_for_text
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import ALL_MEDIA, LoggedRecord, StoredMedium

# What Comet logs or prints by itself.
_OFF = """
    log_code log_graph auto_param_logging auto_metric_logging parse_args auto_output_logging log_env_details
    log_git_metadata log_git_patch
"""


@dataclass(frozen=True, kw_only=True)
class CometOptions:
    """The options of an experiment of Comet.

    Attributes:
        project: The project; if None, Comet's own default.
        workspace: The workspace; if None, Comet's own default.
        tags: Labels of the experiment.
        mode: If None, online where Comet's own configuration holds an API key, else offline.
    """

    project: str | None = None
    workspace: str | None = None
    tags: Sequence[str] = ()
    mode: Literal["online", "offline"] | None = None


class CometTracker(Platform[CometOptions]):
    """A tracker that writes an experiment of Comet.

    Numbers and booleans are metrics, NaN and infinities too; a string is one of Comet's "others", which hold the last
    value; None is only in the log. A record without a step gets the last step. `drivetrain/time` holds a record's
    time. Values that a resumed run logs again are named `attempt-2/NAME`.

    Offline, `write` returns once all values are in the experiment's file of messages, which a kill does not change;
    online, once Comet has all values. A stopped run goes on in a further archive of the same key; the first start
    after a kill also makes the killed process's archive. Upload `KEY.zip` before `KEY-*.zip`.
    """

    name = "comet"
    library = "comet_ml"
    options_type = CometOptions
    media_kinds = ALL_MEDIA - {"histogram"}

    _experiment: Any
    _messages: Path | None  # the file of an offline experiment

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Begin the experiment, after making an archive of messages that a killed process left."""
        comet = load_library("comet_ml", extra=self.name)
        if self._given is None:
            logging.getLogger("comet_ml").setLevel(logging.ERROR)
            self._experiment = self._begin(comet, run_name)
            self._experiment.set_name(run_name)
            self._experiment.add_tags(list(self._options.tags))
        else:
            self._experiment = self._given
        is_offline = isinstance(self._experiment, comet.OfflineExperiment)
        self._messages = Path(self._experiment.tmpdir) / COMET_MESSAGES if is_offline else None
        self._experiment.log_parameters(self.parameters(config))

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write the metrics of each record, the time last, and wait until all have left this process."""
        written_before = self._messages.stat().st_size if self._messages is not None else 0
        for record in records:
            if record.step is not None:
                self._experiment.set_step(record.step)
            for name, medium in record.media.items():
                self._log_medium(name, medium, record.step)
            for name, text in record.texts.items():
                self._experiment.log_other(name, text)
            for name, number in record.numbers.items():
                self._experiment.log_metric(record.attempt_prefix + name, number, step=record.step)
            self._experiment.log_metric("drivetrain/time", float(record.time), step=record.step)
        if self._messages is not None and records:
            wait_for_text(self._messages, repr(float(records[-1].time)), offset=written_before)
        elif not self._experiment.flush():
            raise TimeoutError("comet: Comet did not take all that was sent within its time limit")

    def keep_document(self, name: str, document: Metrics) -> None:
        """Keep a document as the asset `NAME.json`."""
        self._experiment.log_asset_data(json.dumps(document, indent=2), name=f"{name}.json")

    def close(self) -> None:
        """End the experiment; an offline one becomes an archive.

        Comet gets the state of an online experiment; an archive has it among the "others".
        """
        if self.state is not None:
            self._experiment.log_other("drivetrain/state", self.state)
        self._experiment.end()
        if self._messages is None and self.has_ended_early:
            api = load_library("comet_ml.api", extra=self.name).API(cache=False)
            api.get_experiment_by_key(self._experiment.get_key()).set_state(self.state_word)

    def _begin(self, comet: Any, run_name: str) -> Any:
        given, known = self._options, self.run_id(run_name)
        key = known or comet.generate_guid()
        self.remember_run_id(run_name, key)
        names = {"project_name": given.project, "workspace": given.workspace, "experiment_key": key}
        common = {**names, **dict.fromkeys(_OFF.split(), False), "display_summary_level": 0}
        api_key = comet.get_config("comet.api_key")
        if given.mode == "online" or (given.mode is None and api_key):
            return comet.ExistingExperiment(**common) if known else comet.Experiment(**common)
        folder = self.directory / self.name
        self._close_killed(folder, key)
        is_new = not (folder / f"{key}.zip").exists()
        kind = comet.OfflineExperiment if is_new else comet.ExistingOfflineExperiment
        with _temporary_files_in(folder / "running" / key / ("new" if is_new else "more")):
            return kind(offline_directory=str(folder), **common)

    def _close_killed(self, folder: Path, key: str) -> None:
        """Make archives of the messages that killed processes left, and remove archives without messages."""
        for archive in folder.glob(f"{key}*.zip"):
            with zipfile.ZipFile(archive) as file:
                is_written = COMET_MESSAGES in file.namelist()
            if not is_written:
                archive.unlink()
        given = self._options
        for left in sorted((folder / "running" / key).glob("*/*")):
            messages, is_new = left / COMET_MESSAGES, left.parent.name == "new"
            if messages.exists():
                content = messages.read_bytes()
                messages.write_bytes(content[: content.rfind(b"\n") + 1])  # the kill may have cut a line
                write_comet_head(
                    left, key=key, project=given.project, workspace=given.workspace, is_new=is_new
                )
                archive = folder / (f"{key}.zip" if is_new else f"{key}-{left.name}.zip")
                beside = archive.with_suffix(".new")
                with zipfile.ZipFile(beside, "w") as file:
                    for one in sorted(left.iterdir()):
                        file.write(one, one.name)
                beside.replace(archive)
            shutil.rmtree(left)

    def _log_medium(self, name: str, medium: StoredMedium, step: int | None) -> None:
        data: Any = medium.data
        at, path = self._experiment, str(medium.path)
        if medium.kind == "table":
            at.log_table(f"{name}.csv", tabular_data=data["rows"], headers=data["columns"])
        elif medium.kind == "text":
            at.log_text(str(data), step=step, metadata={"name": name})
        elif medium.kind in ("image", "figure"):
            at.log_image(path, name=name, step=step)
        elif medium.kind == "audio":
            at.log_audio(path, file_name=name, step=step)
        elif medium.kind == "video":
            at.log_video(path, name=name, step=step)
        else:
            at.log_asset(path, file_name=name, step=step)


@contextmanager
def _temporary_files_in(folder: Path) -> Generator[None]:
    """Make Python's temporary files in a folder: Comet keeps an experiment in such a file until it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
