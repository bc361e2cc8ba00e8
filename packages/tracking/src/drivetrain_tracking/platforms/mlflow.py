"""MLflow: a tracking server where one is configured, else the sqlite store `DIRECTORY/mlflow/mlflow.db`."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from drivetrain_tracking.platforms.platform import Platform, load_library
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import ALL_MEDIA, LoggedRecord, StoredMedium, count_first_held

_TIME, _ATTEMPT, _INFINITE = "drivetrain/time", "drivetrain/attempt", "drivetrain/infinite"
_MOST_METRICS, _MOST_TAGS = 1000, 100  # MLflow's limits of one call, in which both together are at most 1000
_MOST_CHARACTERS = {"tag": 5000, "param": 6000}


@dataclass(frozen=True, kw_only=True)
class MLflowOptions:
    """The options of a run of MLflow.

    Attributes:
        experiment: The experiment, created where it does not exist.
        tracking_uri: The store, such as "http://127.0.0.1:5000" or "sqlite:///runs.db"; if None, that of
            `mlflow.set_tracking_uri` or MLFLOW_TRACKING_URI, else a sqlite file in the directory.
        tags: Tags of the run.
    """

    experiment: str = "Default"
    tracking_uri: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict[str, str])


class MLflowTracker(Platform[MLflowOptions]):
    """A tracker that writes a run of MLflow through its client.

    Numbers and booleans are metrics, a string is a tag that holds its last value, None is only in the log. A record
    without a step gets step 0. NaN is kept. A store in SQL turns an infinity into the largest number; the metric
    `drivetrain/infinite` counts infinities. `drivetrain/time` holds each record's time. MLflow keeps all values of a
    step; values that a resumed run logs again have `drivetrain/attempt` at the same time.

    `write` returns once the store has committed, which a kill does not change. An image whose record a kill cut off
    may be there twice.
    """

    name = "mlflow"
    library = "mlflow"
    options_type = MLflowOptions
    media_kinds = ALL_MEDIA

    _client: Any
    _run_id: str
    _last_milliseconds: int

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Connect to the store, and create the run or open it again."""
        mlflow = load_library("mlflow", extra=self.name)
        if self._given is not None:
            self._client, self._run_id = mlflow.MlflowClient(), self._given.info.run_id
        else:
            self._open_own(mlflow, run_name)
        # The configuration is kept as `config.json`, and as parameters, which MLflow never lets change.
        entities = load_library("mlflow.entities", extra=self.name)
        self._client.log_dict(self._run_id, dict(config), "config.json")
        known = self._client.get_run(self._run_id).data.params
        new = [
            entities.Param(name, str(value)[: _MOST_CHARACTERS["param"]])
            for name, value in self.parameters(config).items()
            if name not in known
        ]
        for begin in range(0, len(new), _MOST_TAGS):
            self._client.log_batch(self._run_id, params=new[begin : begin + _MOST_TAGS])
        history = self._client.get_metric_history(self._run_id, _TIME)
        self._last_milliseconds = max((metric.timestamp for metric in history), default=0)

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write the records in batches of up to 1000 metrics; a record's time is committed with its last values."""
        metric = load_library("mlflow.entities", extra=self.name).Metric
        batch: list[Any] = []
        tags: dict[str, str] = {}
        for record in records:
            for name, medium in record.media.items():
                self._log_medium(name, medium, record)
            numbers, texts = record.numbers, record.texts
            num_infinite = sum(math.isinf(number) for number in numbers.values())
            more = {_INFINITE: num_infinite} if num_infinite else {}
            more |= {_ATTEMPT: record.attempt} if record.attempt > 1 else {}
            # MLflow keeps one of two equal values of the same name, step and millisecond: each record has its own.
            self._last_milliseconds = max(self._last_milliseconds + 1, int(record.time * 1000))
            metrics = [
                metric(name, number, self._last_milliseconds, record.step or 0)
                for name, number in {**numbers, **more, _TIME: record.time}.items()
            ]
            if len(batch) + len(metrics) + _MOST_TAGS > _MOST_METRICS or len(tags | texts) > _MOST_TAGS:
                self._commit(batch, tags)
                batch, tags = [], {}
            batch += metrics
            tags |= texts
        self._commit(batch, tags)

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Count the records whose times the run's metric `drivetrain/time` holds."""
        times = {metric.value for metric in self._client.get_metric_history(self._run_id, _TIME)}
        return count_first_held(records, times)

    def keep_document(self, name: str, document: Metrics) -> None:
        """Keep a document as the artifact `NAME.json`."""
        self._client.log_dict(self._run_id, dict(document), f"{name}.json")

    def close(self) -> None:
        """Set the run's status in MLflow."""
        if self.state_word is not None:
            self._client.set_terminated(self._run_id, status=self.state_word)

    def _open_own(self, mlflow: Any, run_name: str) -> None:
        folder, artifacts = self.directory / self.name, None
        configured = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
        uri = self._options.tracking_uri or configured
        if uri is None:
            folder.mkdir(exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
            logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it tells of each new table
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = self.run_id(run_name)
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._run_id = known
            return
        name = self._options.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            place = self._client.create_experiment(name, artifact_location=artifacts)
        else:
            place = experiment.experiment_id
        run = self._client.create_run(place, run_name=run_name, tags=dict(self._options.tags))
        self._run_id = run.info.run_id
        self.remember_run_id(run_name, self._run_id)

    def _commit(self, metrics: Sequence[Any], tags: Mapping[str, str]) -> None:
        entities = load_library("mlflow.entities", extra=self.name)
        pairs = [entities.RunTag(name, text[: _MOST_CHARACTERS["tag"]]) for name, text in tags.items()]
        for begin in range(0, len(pairs), _MOST_TAGS):
            self._client.log_batch(self._run_id, tags=pairs[begin : begin + _MOST_TAGS])
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + _MOST_METRICS])

    def _log_medium(self, name: str, medium: StoredMedium, record: LoggedRecord) -> None:
        folder = f"{medium.kind}/{name}"
        place = f"{folder}/{record.step or 0}-{int(record.time * 1000)}"
        if medium.kind == "text":
            self._client.log_text(self._run_id, str(medium.data), f"{place}.txt")
        elif medium.path is None:  # tables and histograms
            self._client.log_dict(self._run_id, medium.data, f"{place}.json")
        elif medium.kind in ("image", "figure") and find_spec("PIL"):
            image = load_library("mlflow", extra=self.name).Image(str(medium.path))
            at = int(record.time * 1000)
            self._client.log_image(self._run_id, image, key=name, step=record.step or 0, timestamp=at)
        else:
            self._client.log_artifact(self._run_id, str(medium.path), place)
