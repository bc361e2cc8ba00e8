import math
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain_tracking.platforms.trackio import TrackioTracker
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium, flat_values
from optional_modules import skip_without
from tracking.platforms.platform_tests import QuietPlatformTests, started

skip_without("orjson")  # a dependency of trackio alone


@pytest.fixture(scope="module", autouse=True)
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Import Trackio with a folder of the tests': it reads the variable once, on import."""
    before = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "trackio"
    }
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        patch.setenv("TRACKIO_STORAGE_MODE", "sqlite")
        pytest.importorskip("trackio")
        yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[name]
    sys.modules.update(before)


def storage() -> Any:
    return sys.modules["trackio.sqlite_storage"].SQLiteStorage


class TestTrackio(QuietPlatformTests):
    tracker = TrackioTracker
    libraries = ("trackio",)

    @pytest.fixture(autouse=True)
    def in_database(self, database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.database = database
        monkeypatch.chdir(tmp_path)

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        return read(TrackioTracker(directory).run_id("contract"))

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return flat_values(values)

    def prepare_kills(self, directory: Path) -> Mapping[str, Any]:
        return {"environment": {"TRACKIO_DIR": str(directory)}}

    def killed_rows(self, directory: Path) -> Sequence[Any]:
        for file in directory.glob("drivetrain.db*"):
            file.rename(self.database / file.name)
        return read(TrackioTracker(directory).run_id("killed"))

    def check_media(self, directory: Path, tracker: Any, media: Mapping[str, StoredMedium]) -> None:
        ((_, row),) = read(tracker.run_id("run"))
        for kind in ("image", "figure", "audio", "video"):
            kept = self.database / "media" / row[kind]["file_path"]
            assert kept.read_bytes() == media[kind].path.read_bytes()
            assert (row[kind]["caption"], str(directory) in str(kept)) == ("a caption", False)
        assert row["table"]["_value"] == [{"name": "a", "n": 1}, {"name": "b", "n": 2.5}]
        assert (row["histogram"]["values"], row["histogram"]["bins"]) == ([1, 4, 2], [0.0, 1.0, 2.0, 3.0])
        assert row["text"]["_value"] == "<b>said</b>"
        (artifact,) = storage().list_artifacts("drivetrain")
        assert artifact["name"] == "run-artifact"
        manifest = storage().get_artifact_manifest("drivetrain", "run-artifact", "latest")["manifest"]
        assert [(one["path"], one["size"]) for one in manifest] == [("artifact.txt", len("an artifact"))]

    def open_live(self, directory: Path) -> Any:
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        return sys.modules["trackio"].init(project="mine", name="live", config={"seed": 1}, **quiet)

    def check_live(self, directory: Path, live: Any) -> None:
        live.log({"loss": 0.25}, step=2)
        sys.modules["trackio"].finish()
        assert read(live.id, "mine") == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]
        assert storage().get_run_config("mine", "live")["seed"] == 1


def read(run_id: str | None, project: str = "drivetrain") -> list[tuple[int, dict[str, object]]]:
    """Return the steps and values that Trackio's own reader finds of a run and its attempts."""
    found: list[tuple[str, int, dict[str, object]]] = []
    for record in storage().get_run_records(project):
        if run_id is not None and record["id"].startswith(run_id):
            rows = storage().get_logs(project, run_id=record["id"])
            found += [(row.pop("timestamp"), row.pop("step"), row) for row in rows]
    return [(step, values) for _, step, values in sorted(found, key=lambda one: one[0])]


def test_trackio_knows_the_configuration_the_plan_and_the_group(tmp_path: Path) -> None:
    tracker = started(TrackioTracker(tmp_path), project="known", group="trials")
    tracker.record_plan({"world_size": 2})
    tracker.log({"loss": 0.5}, step=3)
    tracker.finish()
    config = storage().get_run_config("known", "run")
    created = config.pop("_Created")
    assert config == {"lr": 0.1, "model": {"width": 8}, "plan": {"world_size": 2}, "_Group": "trials"}
    again = started(TrackioTracker(tmp_path), project="known")
    again.log({"loss": 0.25}, step=4)
    assert storage().get_run_config("known", "run")["_Created"] == created
    assert len(storage().get_run_records("known")) == 1


def test_all_values_stay_and_reserved_names_are_marked(tmp_path: Path) -> None:
    tracker = started(TrackioTracker(tmp_path))
    tracker.log({"loss": math.nan, "norm": -math.inf, "best": None, "done": True, "time": 3.5}, step=2)
    ((step, values),) = read(tracker.run_id("run"))
    assert math.isnan(values.pop("loss"))
    assert (step, values) == (2, {"norm": -math.inf, "best": None, "done": True, "time-33607480": 3.5})


def test_a_record_without_a_step_gets_the_next_one(tmp_path: Path) -> None:
    tracker = started(TrackioTracker(tmp_path))
    for step in (None, 7, None):
        tracker.log({"loss": 0.5}, step=step)
    assert [step for step, _ in read(tracker.run_id("run"))] == [0, 7, 8]


def test_steps_logged_again_are_a_run_of_their_own(tmp_path: Path) -> None:
    tracker = started(TrackioTracker(tmp_path), project="again")
    tracker.write([LoggedRecord(time=1.0, step=5, values={"loss": 1.0})])
    tracker.write([LoggedRecord(time=2.0, step=5, attempt=2, values={"loss": 2.0})])
    assert storage().get_logs("again", "run")[0]["loss"] == 1.0
    (row,) = storage().get_logs("again", "run (attempt 2)")
    assert row == {"timestamp": "1970-01-01T00:00:02.000000+00:00", "step": 5, "loss": 2.0}


def test_a_record_is_written_once(tmp_path: Path) -> None:
    tracker = started(TrackioTracker(tmp_path))
    for _ in range(2):
        tracker.write([LoggedRecord(time=1.0, step=5, values={"loss": 1.0})])
    assert read(tracker.run_id("run")) == [(5, {"loss": 1.0})]


@pytest.mark.parametrize(
    "num_statements",
    [pytest.param(0, id="no table"), pytest.param(1, id="a table without its later columns")],
)
def test_a_database_whose_making_was_killed_is_completed(num_statements: int, tmp_path: Path) -> None:
    project = f"killed after {num_statements}".replace(" ", "-")
    with sqlite3.connect(storage().get_project_db_path(project)) as database:
        for _ in range(num_statements):
            database.execute(
                "CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT, timestamp TEXT NOT NULL, "
                "run_name TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL)"
            )
    tracker = started(TrackioTracker(tmp_path), project=project)
    record = LoggedRecord(time=1.0, step=5, values={"loss": 1.0})
    assert tracker.count_held([record]) == 0
    tracker.write([record])
    assert tracker.count_held([record]) == 1
    assert read(tracker.run_id("run"), project) == [(5, {"loss": 1.0})]


def test_a_run_of_a_server_is_refused_with_another_way(tmp_path: Path) -> None:
    trackio = sys.modules["trackio"]
    live = trackio.Run(
        "http://127.0.0.1:1", "far", object(), name="live", server_base_url="http://127.0.0.1:1"
    )
    with pytest.raises(ValueError, match=r"'live' goes to http://127.0.0.1:1; .*trackio.sync"):
        TrackioTracker.of(live)
    live.finish()


def test_a_hostile_run_name_stays_in_the_folder(
    tmp_path: Path, database: Path, media: Mapping[str, StoredMedium]
) -> None:
    tracker = TrackioTracker(tmp_path)
    tracker.start("../../../escaped", {}, project="hostile")
    tracker.write([LoggedRecord(time=1.0, step=1, media=media)])
    images = (database / "media" / "hostile").rglob("1/*.png")
    assert len(list(images)) == 2
    assert not [one for one in database.parent.rglob("escaped*") if database not in one.parents]


def test_a_run_that_was_not_finished_says_so_until_it_goes_on(tmp_path: Path) -> None:
    for state in ("killed", "finished"):
        tracker = started(TrackioTracker(tmp_path), project="ended")
        tracker.log({"loss": 0.5, "time": 1, "_time": 2, "step": 3}, step=3)
        tracker.end(state)
        config = storage().get_run_config("ended", run_id=tracker.run_id("run"))
        assert config.get("state") == (None if state == "finished" else "killed")
    rows = [values for _, values in read(tracker.run_id("run"), "ended")]
    assert [sorted(map(str, row.values())) for row in rows] == [
        ["0.5", "1", "2", "3"],
        ["killed"],
        ["0.5", "1", "2", "3"],
    ]
