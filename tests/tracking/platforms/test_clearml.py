import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain_tracking.platforms.clearml import ClearMLTracker
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium
from killed_trackers import distinct_rows
from optional_modules import import_later
from tracking.platforms.platform_tests import PlatformTests

clearml = import_later("clearml")

pytestmark = [
    pytest.mark.slow,
    # the reader of configuration files that clearml 2.1 brings calls pyparsing 3 by its old names
    pytest.mark.filterwarnings("ignore:'.*' .*deprecated.* use '.*':DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ClearML keeps sessions in a folder of the test, and no access key is configured."""
    for name in ("CLEARML_API_ACCESS_KEY", "TRAINS_API_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where it remembers the last task
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path / "none.conf"))
    monkeypatch.setenv("CLEARML_LOG_LEVEL", "ERROR")
    for name in ("CLEARML_OFFLINE_MODE", "CLEARML_PROC_MASTER_ID"):  # which ClearML sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def events_of(tmp_path: Path, sessions: Sequence[str]) -> list[dict]:
    """Return the events of sessions, from their archives where they ended, else from their folders."""
    found = []
    for session in sessions:
        folder = tmp_path / "cache" / "offline" / session
        if zipfile.is_zipfile(folder.with_suffix(".zip")):
            with zipfile.ZipFile(folder.with_suffix(".zip")) as file:
                text = file.read("metrics.jsonl").decode() if "metrics.jsonl" in file.namelist() else ""
        else:
            text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
        found += [event for line in text.splitlines() for event in json.loads(line)]
    return found


def sessions_of(directory: Path) -> list[str]:
    return " ".join(json.loads((directory / "clearml.runs.json").read_text()).values()).split()


def read_rows(events: Sequence[dict]) -> list[tuple[int, dict[str, float]]]:
    """Return the step and values of each record: the scalars up to one of its time."""
    found, row = [], {}
    for event in events:
        if event["type"] != "training_stats_scalar":
            continue
        title, series = event["metric"], event["variant"].removesuffix(" (attempt 2)")
        if (title, series) == ("drivetrain", "time"):
            found.append((event["iter"], row))
            row = {}
        else:
            row[title if series == title else f"{title}/{series}"] = event["value"]
    assert not row, "the scalars of a record end with its time"
    return found


class TestClearML(PlatformTests):
    tracker = ClearMLTracker
    libraries = ("clearml",)
    counts_held = False

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        return read_rows(events_of(self.tmp_path, sessions_of(directory)))

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return LoggedRecord(time=0.0, values=values).numbers

    def killed_rows(self, directory: Path) -> Sequence[Any]:
        return distinct_rows(read_rows(events_of(directory, sessions_of(directory))))

    def check_media(self, directory: Path, tracker: Any, media: Mapping[str, StoredMedium]) -> None:
        (session,) = sessions_of(directory)
        kinds = {event["metric"]: event["type"] for event in events_of(self.tmp_path, [session])}
        assert kinds == {
            **dict.fromkeys(("image", "figure", "audio", "video"), "training_debug_image"),
            **dict.fromkeys(("table", "histogram"), "plot"),
            "drivetrain": "training_stats_scalar",
        }
        with zipfile.ZipFile(self.tmp_path / "cache" / "offline" / f"{session}.zip") as file:
            contents = [file.read(name) for name in file.namelist()]
        for kind in ("image", "audio", "video", "artifact"):
            assert media[kind].path.read_bytes() in contents
        assert any(b"text: <b>said</b>" in content for content in contents)

    def open_live(self, directory: Path) -> Any:
        clearml.Task.set_offline(True)
        return clearml.Task.init("p", "mine", reuse_last_task_id=False, auto_connect_frameworks=False)

    def check_live(self, directory: Path, live: Any) -> None:
        live.get_logger().report_scalar("mine", "mine", 1, iteration=8)
        live.close()
        found = [(event["metric"], event["iter"]) for event in events_of(directory, [live.id])]
        assert found == [("loss", 1), ("drivetrain", 1), ("mine", 8)]


def test_values_that_are_not_finite_are_marked_and_texts_are_in_the_console(tmp_path: Path) -> None:
    tracker = ClearMLTracker(tmp_path)
    tracker.start("first", {"lr": {"head": 0.1}}, project="p", tags=["a"], mode="offline")
    values = {"loss": math.nan, "grad/norm": -math.inf, "phase": "end", "none": None}
    tracker.write([LoggedRecord(time=1_700_000_000.2512345, step=3, attempt=2, values=values)])
    tracker.record_plan({"backend": "ddp"})
    tracker.finish()
    (session,) = sessions_of(tmp_path)
    scalars = {
        (event["metric"], event["variant"]): event["value"] for event in events_of(tmp_path, [session])
    }
    assert scalars == {
        ("loss", "loss is NaN (attempt 2)"): 1,
        ("grad", "norm is -Infinity (attempt 2)"): 1,
        ("drivetrain", "time"): 1_700_000_000.2512345,
    }
    with zipfile.ZipFile(tmp_path / "cache" / "offline" / f"{session}.zip") as file:
        task = json.loads(file.read("task.json"))
        assert b"phase: end" in file.read("log.jsonl")
    assert (task["name"], task["project_name"], task["tags"]) == ("first", "p", ["a"])
    assert "ddp" in task["configuration"]["plan"]["value"]
    assert "0.1" in json.dumps(task["hyperparams"])


def test_a_session_says_how_the_run_ended_and_names_stay_apart(tmp_path: Path) -> None:
    tracker = ClearMLTracker(tmp_path / "run")
    tracker.start("run", {"a": {"b": 1}, "a/b": 2})
    names = ("loss", "loss/loss", "loss/", "/loss", "loss is NaN", "loss (attempt 2)")
    tracker.log({name: number for number, name in enumerate(names, 1)}, step=1)
    tracker.end("failed")
    events = events_of(tmp_path, sessions_of(tmp_path / "run"))
    ((_, row),) = read_rows(events)
    assert sorted(row.values()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    (archive,) = (tmp_path / "cache" / "offline").glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        task = json.loads(file.read("task.json"))
        assert "the run was not finished: failed" in file.read("log.jsonl").decode()
    assert task["configuration"]["state"]["value"].split() == ["state", "=", '"failed"']
    assert sorted(one["value"] for one in task["hyperparams"]["General"].values()) == ["1", "2"]
