"""Weights & Biases: online where somebody is logged in, else `offline-run-*` folders for `wandb sync`."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from drivetrain_tracking.platforms.compat import WANDB_FLUSH_SETTING
from drivetrain_tracking.platforms.platform import Platform, load_library, wait_for_text
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import ALL_MEDIA, LoggedRecord, StoredMedium

_FLUSH_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class WandbOptions:
    """The options of a run of Weights & Biases.

    Attributes:
        project: The project; if None, wandb's own default.
        entity: The user or team; if None, wandb's own default.
        group: A group of runs, such as those of one sweep.
        job_type: The kind of run within its group, such as "train".
        tags: Labels of the run.
        notes: A longer description.
        mode: If None, wandb's own environment and login decide; offline where nobody is logged in.
    """

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: Sequence[str] = ()
    notes: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None


class WandbTracker(Platform[WandbOptions]):
    """A tracker that writes a run of Weights & Biases.

    Each record is one row of the run's history, with its own time as `_timestamp`. wandb's step counts rows, since
    wandb drops a row whose step is behind; the optimizer step is `drivetrain/step`, the x axis of all charts. Rows
    that a resumed run logs again have `drivetrain/attempt`. Strings, booleans, None, NaN and infinities are kept.

    wandb writes from a service process. `write` returns once the row is in the run's `.wandb` file, which neither a
    kill of this process nor one of the service changes. After a kill of an online run, `wandb sync` uploads the rest
    from that file. A stopped offline run goes on in another `offline-run-*` folder with the same id, which
    `wandb beta sync` joins to one run.
    """

    name = "wandb"
    library = "wandb"
    options_type = WandbOptions
    joining_variables = ("WANDB_SERVICE",)
    media_kinds = ALL_MEDIA

    _run: Any
    _run_name: str
    _num_rows: int = 0

    @staticmethod
    def directory_of(given: Any) -> Path:
        """Return the folder of the user's `wandb.Run`.

        `write` returns once wandb's service process has the rows; that process writes the rows to the run's file at
        the intervals of the run's settings, and when this process dies.
        """
        return Path(given.dir)

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Start wandb's service process and the run."""
        wandb = load_library("wandb", extra=self.name)
        if self._given is not None:
            self._run = self._given
            self._run.config.update(self.parameters(config), allow_val_change=True)
        else:
            known_id, _, num_rows = (self.run_id(run_name) or "").partition(" ")
            self._run = self._init(wandb, run_name, known_id or None, config)
            self._run_name, self._num_rows = run_name, int(num_rows or 0)
            self._remember()
            self._run.define_metric("drivetrain/step", hidden=True)
            self._run.define_metric("*", step_metric="drivetrain/step", step_sync=False)

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write each record as one row, and wait until all are in the run's file."""
        wandb = load_library("wandb", extra=self.name)
        file = Path(self._run.settings.sync_file)
        written_before = file.stat().st_size if file.exists() else 0
        for record in records:
            row: dict[str, Any] = {**record.values, "_timestamp": float(record.time)}
            if record.step is not None:
                row["drivetrain/step"] = record.step
            if record.attempt > 1:
                row["drivetrain/attempt"] = record.attempt
            for name, medium in record.media.items():
                if medium.kind == "artifact":
                    artifact = wandb.Artifact(name, type="file", description=medium.caption or None)
                    artifact.add_file(str(medium.path))
                    self._run.log_artifact(artifact)
                else:
                    row[name] = self._medium(medium)
            step = None if self._given is not None else self._num_rows
            self._run.log(row, step=step, commit=True)
            self._num_rows += 1
        _ = self._run.step  # the service answers after it took what was sent before
        if self._given is None and not self._run.disabled and records:
            # wandb writes a time as 1.76e+09, with as many digits as it needs.
            mantissa = f"{Decimal(repr(float(records[-1].time))).normalize():e}".partition("e")[0]
            wait_for_text(file, mantissa, offset=written_before)
            self._remember()

    def keep_document(self, name: str, document: Metrics) -> None:
        """Keep a document as the artifact `NAME-RUN` of the type `NAME`."""
        artifact = load_library("wandb", extra=self.name).Artifact(f"{name}-{self._run.id}", type=name)
        with artifact.new_file(f"{name}.json") as file:
            json.dump(document, file, indent=2)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish(exit_code=self.state_word or 0)

    def _init(self, wandb: Any, run_name: str, run_id: str | None, config: Mapping[str, Plain]) -> Any:
        options = asdict(self._options)
        options["mode"] = options["mode"] or (None if wandb.login(prompt=False) else "offline")
        options["tags"] = tuple(options["tags"]) or None
        quiet: dict[str, Any] = {"silent": True, "console": "off", WANDB_FLUSH_SETTING: _FLUSH_SECONDS}
        return wandb.init(
            dir=str(self.directory),
            name=run_name,
            id=run_id,
            resume="allow" if run_id and options["mode"] != "offline" else None,
            config=self.parameters(config),
            reinit="create_new",  # a run of the user's in this process stays wandb.run
            settings=wandb.Settings(**quiet),
            **options,
        )

    def _remember(self) -> None:
        """Note the id and the number of rows: wandb drops rows of a stopped run whose numbers are not new."""
        self.remember_run_id(self._run_name, f"{self._run.id} {self._num_rows}")

    def _medium(self, medium: StoredMedium) -> Any:
        wandb = load_library("wandb", extra=self.name)
        data: Any = medium.data
        if medium.kind == "table":
            return wandb.Table(columns=data["columns"], data=data["rows"], allow_mixed_types=True)
        if medium.kind == "histogram":
            return wandb.Histogram(np_histogram=(data["counts"], data["edges"]))
        if medium.kind == "text":
            return wandb.Html(f"<pre>{html.escape(str(data))}</pre>", inject=False)
        kinds = {"image": wandb.Image, "figure": wandb.Image, "audio": wandb.Audio, "video": wandb.Video}
        return kinds[medium.kind](str(medium.path), caption=medium.caption or None)
