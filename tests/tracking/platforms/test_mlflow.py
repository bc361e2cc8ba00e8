import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_tracking.platforms.conventions import CONVENTIONS
from drivetrain_tracking.platforms.mlflow import MLflowTracker
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium
from optional_modules import import_later, skip_without
from tracking.platforms.platform_tests import PlatformTests, started

mlflow = import_later("mlflow")
skip_without("sqlalchemy")

pytestmark = [
    # mlflow 3.17's own use of SQLAlchemy 2.1
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
    # SQLAlchemy's pool is collected after its last connection, by the interpreter and not by mlflow
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One sqlite store for the module, since making its tables takes seconds, and nothing is configured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/store.db"


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MLflow keeps artifacts of a store that names no place for them in `mlruns` of the current folder."""
    monkeypatch.chdir(tmp_path)


class TestMLflow(PlatformTests):
    """Each directory is an experiment of one store."""

    tracker = MLflowTracker
    libraries = ("mlflow",)

    @pytest.fixture(autouse=True)
    def in_store(self, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        monkeypatch.setenv("MLFLOW_TRACKING_URI", store)

    def make(self, directory: Path) -> MLflowTracker:
        class InExperiment(MLflowTracker):
            def start(self, run_name, config, **options) -> None:
                super().start(run_name, config, experiment=str(directory), **options)

        return InExperiment(directory)

    @pytest.mark.slow  # MLflow begins each experiment by a dozen of transactions
    def test_it_passes_the_contract_of_platforms(self, tmp_path: Path) -> None:
        super().test_it_passes_the_contract_of_platforms(tmp_path)

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        return list(read_rows(*only_run(self.store, str(directory))).values())

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return LoggedRecord(time=0.0, values=values).numbers

    def prepare_kills(self, directory: Path) -> Mapping[str, Any]:
        started(MLflowTracker(directory / "other")).finish()  # makes the tables, which takes seconds
        return {"options": {"experiment": str(directory)}}

    def killed_rows(self, directory: Path) -> Sequence[Any]:
        return self.logged(directory)

    def check_media(self, directory: Path, tracker: Any, media: Mapping[str, StoredMedium]) -> None:
        kept = artifacts_of(*only_run(self.store, str(directory)))
        images = [path for path in kept if path.startswith("images/") and path.endswith(".png")]
        assert sorted(path.split("+")[0] for path in images) == ["images/figure", "images/image"]
        assert {path for path in kept if not path.startswith("images/")} == {
            "config.json",
            "plan.json",
            "audio/audio/7-1500/audio.wav",
            "video/video/7-1500/video.gif",
            "artifact/artifact/7-1500/artifact.txt",
            "table/table/7-1500.json",
            "histogram/histogram/7-1500.json",
            "text/text/7-1500.txt",
        }

    def open_live(self, directory: Path) -> Any:
        experiment = mlflow.MlflowClient().create_experiment(str(directory))
        return mlflow.start_run(experiment_id=experiment)

    def check_live(self, directory: Path, live: Any) -> None:
        assert mlflow.get_run(live.info.run_id).info.status == "RUNNING"
        mlflow.end_run()
        held = mlflow.get_run(live.info.run_id).data
        assert (held.metrics["loss"], held.params) == (0.5, {"lr": "0.1"})


def only_run(store: str, experiment: str):
    client = mlflow.MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


def read_rows(client, run) -> dict[int, tuple[int, dict[str, float]]]:
    """Return the step and values of each millisecond, in order."""
    found: dict[int, tuple[int, dict[str, float]]] = defaultdict(lambda: (0, {}))
    for name in client.get_run(run.info.run_id).data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            found[metric.timestamp] = (metric.step, found[metric.timestamp][1])
            if not name.startswith("drivetrain/"):
                found[metric.timestamp][1][name] = metric.value
    return dict(sorted(found.items()))


def artifacts_of(client, run, path: str | None = None) -> list[str]:
    found = []
    for file in client.list_artifacts(run.info.run_id, path):
        found += artifacts_of(client, run, file.path) if file.is_dir else [file.path]
    return found


def test_a_record_keeps_its_time_attempt_text_and_nan_and_an_infinity_is_counted(
    tmp_path: Path, store: str
) -> None:
    tracker = MLflowTracker(tmp_path)
    tracker.start("first", {"lr": {"head": 0.1}}, tracking_uri=store, experiment="e1", tags={"by": "me"})
    values = {"loss": math.nan, "up": math.inf, "phase": "end", "none": None, "odd #name!": 1}
    tracker.write([LoggedRecord(time=1_700_000_000.2512345, step=3, attempt=2, values=values)])
    tracker.finish()
    client, run = only_run(store, "e1")
    held = client.get_run(run.info.run_id).data
    assert held.metrics["drivetrain/time"] == 1_700_000_000.2512345
    assert held.metrics["drivetrain/attempt"] == 2
    assert held.metrics["drivetrain/infinite"] == 1
    assert math.isnan(held.metrics["loss"])
    assert held.metrics["up"] >= sys.float_info.max
    assert held.metrics[CONVENTIONS["mlflow"].values.name_of("odd #name!")] == 1
    assert (held.tags["phase"], held.tags["by"], held.params) == ("end", "me", {"lr/head": "0.1"})
    assert run.info.status == "FINISHED"


def test_equal_values_within_one_millisecond_are_all_kept(tmp_path: Path, store: str) -> None:
    tracker = MLflowTracker(tmp_path)
    tracker.start("first", {}, tracking_uri=store, experiment="e2")
    tracker.write([LoggedRecord(time=1.0 + n / 100_000, values={"loss": 1.0}) for n in range(5)])
    client, run = only_run(store, "e2")
    assert [metric.value for metric in client.get_metric_history(run.info.run_id, "loss")] == [1.0] * 5
    tracker.finish()


def test_more_metrics_and_tags_than_one_call_takes_are_written(tmp_path: Path, store: str) -> None:
    tracker = MLflowTracker(tmp_path)
    tracker.start("first", {f"p{n}": n for n in range(130)}, tracking_uri=store, experiment="e3")
    many = {f"m{n}": n for n in range(1500)} | {f"t{n}": "text" for n in range(130)}
    tracker.write([LoggedRecord(time=1.0, values=many), LoggedRecord(time=2.0, values={"last": 1})])
    tracker.finish()
    client, run = only_run(store, "e3")
    held = client.get_run(run.info.run_id).data
    assert len([name for name in held.metrics if name.startswith("m")]) == 1500
    assert held.metrics["last"] == 1
    assert len([name for name in held.tags if name.startswith("t")]) == 130
    assert len(held.params) == 130


def test_a_changed_configuration_of_a_continued_run_is_in_its_file(tmp_path: Path, store: str) -> None:
    for config in ({"lr": 0.1}, {"lr": 0.2, "new": 1}):
        tracker = MLflowTracker(tmp_path)
        tracker.start("first", config, tracking_uri=store, experiment="e4")
        tracker.finish()
    client, run = only_run(store, "e4")
    assert client.get_run(run.info.run_id).data.params == {"lr": "0.1", "new": "1"}
    kept = Path(client.download_artifacts(run.info.run_id, "config.json", str(tmp_path)))
    assert json.loads(kept.read_text()) == {"lr": 0.2, "new": 1}


@given(st.text())
def test_every_name_becomes_one_that_mlflow_takes(name: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    validation._validate_metric_name(CONVENTIONS["mlflow"].values.name_of(name))


@pytest.mark.parametrize(("state", "word"), [("failed", "FAILED"), ("killed", "KILLED"), (None, "RUNNING")])
def test_mlflow_shows_how_a_run_ended_and_that_it_was_finished_later(
    tmp_path: Path, store: str, state: RunState | None, word: str
) -> None:
    for ended, shown in ((state, word), ("finished", "FINISHED")):
        tracker = MLflowTracker(tmp_path)
        tracker.start("first", {}, tracking_uri=store, experiment=f"ended {state}")
        assert only_run(store, f"ended {state}")[1].info.status == "RUNNING"
        tracker.end(ended)
        assert only_run(store, f"ended {state}")[1].info.status == shown


NAMES = ["recall@10", "recall#10", "recall-10", "loss", "loss/..", "loss/", "drivetrain/time", "x" * 300]
NAMES += ["..", ""]


def test_names_that_mlflow_does_not_take_stay_apart_and_each_is_told_once(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    numbers, texts = {name: float(n) for n, name in enumerate(NAMES)}, {name: name for name in NAMES}
    for step in range(2):  # the second is a process that goes on
        tracker = MLflowTracker(tmp_path)
        config = {**numbers, "a": {"b": 1}, "a/b": 2}
        tracker.start("first", config, tracking_uri=store, experiment="names")
        tracker.write([LoggedRecord(time=1.0 + 2 * step, step=step, values=numbers)])
        tracker.write([LoggedRecord(time=2.0 + 2 * step, step=step, values={**texts, "mlflow.runName": "x"})])
        tracker.finish()
    client, run = only_run(store, "names")
    held = client.get_run(run.info.run_id)
    metrics = {name: value for name, value in held.data.metrics.items() if name != "drivetrain/time"}
    assert sorted(metrics.values()) == sorted(numbers.values())
    assert (metrics["loss"], metrics["recall-10"]) == (3.0, 2.0)
    assert set(texts.values()) <= set(held.data.tags.values())
    assert sorted(held.data.params.values()) == sorted([*map(str, numbers.values()), "1", "2"])
    assert held.info.run_name == "first"
    told = [record.getMessage() for record in caplog.records if "and shows it as" in record.getMessage()]
    assert sum("'recall@10'" in line for line in told) == 2, "once in each of two processes"
