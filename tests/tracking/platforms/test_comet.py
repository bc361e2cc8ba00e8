import json
import math
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain_tracking.platforms.comet import CometTracker
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium
from killed_trackers import distinct_rows
from optional_modules import import_later
from tracking.platforms.platform_tests import PlatformTests

comet_ml, offline = import_later("comet_ml"), import_later("comet_ml.offline")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No API key is configured."""
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    monkeypatch.setenv("COMET_CONFIG", str(tmp_path / "none.config"))


def messages(directory: Path) -> list[dict]:
    """Return the messages of ended experiments, from archives as Comet opens them, and of running ones."""
    found = []
    archives = sorted(directory.glob("comet/*.zip"), key=lambda one: (one.stat().st_mtime_ns, one.name))
    for archive in archives:
        with zipfile.ZipFile(archive) as file:
            if not file.namelist():  # begun: it is written when the experiment ends
                continue
        folder = Path(offline.unzip_offline_archive(str(archive)))
        found += [json.loads(line) for line in (folder / "messages.json").read_text().splitlines()]
        shutil.rmtree(folder)
    for file in directory.glob("comet/running/*/*/*/messages.json"):
        found += [json.loads(line) for line in file.read_text().splitlines()]
    return found


def read_rows(directory: Path) -> list[tuple[int | None, dict[str, float]]]:
    """Return the step and values of each record: the metrics up to one of its time."""
    found, row = [], {}
    for message in messages(directory):
        if message["type"] == "metric_msg":
            metric = message["payload"]["metric"]
            if metric["metricName"] == "drivetrain/time":
                found.append((metric["step"], row))
                row = {}
            elif metric["metricName"] != "process duration":  # Comet's own, at the end
                row[metric["metricName"].rpartition("attempt-2/")[2]] = float(metric["metricValue"])
    assert not row, "the metrics of a record end with its time"
    return found


class TestComet(PlatformTests):
    tracker = CometTracker
    libraries = ("comet_ml",)
    counts_held = False

    @pytest.mark.slow  # Comet takes a second to end an experiment
    def test_it_passes_the_contract_of_platforms(self, tmp_path: Path) -> None:
        super().test_it_passes_the_contract_of_platforms(tmp_path)

    @pytest.mark.slow
    def test_a_run_of_the_users_gets_the_values_and_stays_open(self, tmp_path: Path) -> None:
        super().test_a_run_of_the_users_gets_the_values_and_stays_open(tmp_path)

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        return read_rows(directory)

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return LoggedRecord(time=0.0, values=values).numbers

    def killed_rows(self, directory: Path) -> Sequence[Any]:
        archives = list(directory.glob("comet/*.zip"))
        assert len({file.name[:32] for file in archives}) == 1, "a stopped run keeps its key"
        for archive in archives:
            with zipfile.ZipFile(archive) as file:
                head = json.loads(file.read("experiment.json"))
            is_first = archive.name == f"{head['offline_id']}.zip"
            assert head["resume_strategy"] == ("create" if is_first else "get")
        return sorted(distinct_rows(read_rows(directory)))

    def check_media(self, directory: Path, tracker: Any, media: Mapping[str, StoredMedium]) -> None:
        uploads = [m["payload"] for m in messages(directory) if m["type"] == "file_upload"]
        assert " ".join(sorted(upload["upload_type"] for upload in uploads)) == (
            "asset asset asset audio text-sample video visualization visualization"
        )
        (archive,) = (directory / "comet").glob("*.zip")
        with zipfile.ZipFile(archive) as file:
            contents = [file.read(upload["file_path"]) for upload in uploads]
        assert {b"an artifact", b"<b>said</b>", media["image"].path.read_bytes()} <= {*contents}
        assert any(b"ddp" in content for content in contents)

    def open_live(self, directory: Path) -> Any:
        quiet = {"log_code": False, "log_env_details": False}
        return comet_ml.OfflineExperiment(offline_directory=str(directory / "comet"), **quiet)

    def check_live(self, directory: Path, live: Any) -> None:
        assert live.alive
        live.end()
        assert read_rows(directory) == [(1, {"loss": 0.5})]


def test_a_record_keeps_its_time_nan_infinities_and_texts(tmp_path: Path) -> None:
    tracker = CometTracker(tmp_path)
    tracker.start("first", {"lr": {"head": 0.1}}, project="p", tags=["a"], mode="offline")
    values = {"loss": math.nan, "up": math.inf, "phase": "end", "none": None}
    tracker.write([LoggedRecord(time=1_700_000_000.2512345, step=3, attempt=2, values=values)])
    tracker.record_plan({"backend": "ddp"})
    tracker.finish()
    told: dict[str, list[Any]] = {}
    for message in messages(tmp_path):
        told.setdefault(message["type"], []).append(message["payload"])
    metrics = {one["metric"]["metricName"]: one["metric"] for one in told["metric_msg"]}
    nan = metrics["attempt-2/loss"]
    assert metrics["drivetrain/time"]["metricValue"] == 1_700_000_000.2512345
    assert nan["metricValue"] == "NaN"
    assert metrics["attempt-2/up"] == {**nan, "metricName": "attempt-2/up", "metricValue": "Infinity"}
    others = {one["key"]: one["value"] for one in told["log_other"]}
    assert (others["phase"], others["Name"]) == ("end", "first")
    parameters = {one["param"]["paramName"]: one["param"]["paramValue"] for one in told["parameter_msg"]}
    assert parameters["lr|head"] == 0.1
    assert not tempfile.gettempdir().startswith(str(tmp_path))


def test_an_option_with_a_value_that_is_not_allowed_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    tracker = CometTracker(tmp_path / "run")
    with pytest.raises(ValueError, match=r"'comet': mode='ofline': must be one of 'online', 'offline'"):
        tracker.start("first", {}, mode="ofline")
    with pytest.raises(
        TypeError, match=r"takes no modes; of its own it takes project, workspace, tags, mode"
    ):
        tracker.start("first", {}, modes="offline")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("state", ["finished", "failed", "killed"])
@pytest.mark.default_cases("killed")
def test_an_archive_says_how_the_run_ended(tmp_path: Path, state: RunState) -> None:
    tracker = CometTracker(tmp_path)
    tracker.start("run", {"a": {"b": 1}, "a|b": 2})
    tracker.log({"loss": 1.0, "attempt-2/loss": 2.0, "drivetrain/time": 3.0, "Name": "x"}, step=1)
    tracker.end(state)
    sent = json.dumps(messages(tmp_path))
    assert f'"{state}"' in sent
    ((_, row),) = read_rows(tmp_path)
    assert sorted(row.values()) == [1.0, 2.0, 3.0]
