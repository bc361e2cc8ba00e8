import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain_tracking.platforms.wandb import WandbTracker
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium, flat_values
from killed_trackers import distinct_rows, numbered_records
from optional_modules import import_later
from tracking.platforms.platform_tests import PlatformTests

wandb = import_later("wandb")


@pytest.fixture(autouse=True, scope="module")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nobody is logged in, and wandb's service process keeps its files to a folder of the tests."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR"):
            patch.delenv(name, raising=False)
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "NETRC"):
            patch.setenv(name, str(home / name.lower()))
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        yield
        wandb.teardown()


def read_log(directory: Path) -> list[dict]:
    """Return the messages of a directory's runs, as `wandb leet inspect --json` prints them."""
    found = []
    for file in sorted(directory.glob("wandb/*run-*/run-*.wandb")):
        command = [wandb.util.get_core_path(), "leet", "inspect", "--no-observability", "--json"]
        command += ["--run-file", str(file), str(file.parents[1])]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found += [json.loads(line) for line in printed.splitlines()]
    return found


def rows(directory: Path) -> list[dict]:
    return [message["history"]["item"] for message in read_log(directory) if message["type"] == "history"]


def values_of(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith(("_", "drivetrain/"))}


class TestWandb(PlatformTests):
    tracker = WandbTracker
    libraries = ("wandb",)
    counts_held = False

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, Any]]]:
        return [(row.get("drivetrain/step"), values_of(row)) for row in rows(directory)]

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return flat_values(values)

    def killed_rows(self, directory: Path) -> Sequence[Any]:
        return distinct_rows([(step, dict(values)) for step, values in self.logged(directory)])

    def check_media(self, directory: Path, tracker: Any, media: Mapping[str, StoredMedium]) -> None:
        (row,) = rows(directory)
        kinds = {name: row[f"{name}._type"] for name in media if f"{name}._type" in row}
        assert kinds == {
            "image": "image-file",
            "figure": "image-file",
            "audio": "audio-file",
            "video": "video-file",
            "table": "table-file",
            "histogram": "histogram",
            "text": "html-file",
        }
        assert row["histogram.values"] == [1, 4, 2]
        (folder,) = (directory / "wandb").glob("offline-run-*")
        for name in ("image", "audio", "video", "text"):
            assert (folder / "files" / row[f"{name}.path"]).stat().st_size > 0
        assert "&lt;b&gt;said" in (folder / "files" / row["text.path"]).read_text()
        artifacts = [one["artifact"] for one in read_log(directory) if one["type"] == "artifact"]
        assert {"file", "plan", "run_table"} == {artifact["type"] for artifact in artifacts}

    def open_live(self, directory: Path) -> Any:
        settings = wandb.Settings(silent=True, console="off", mode="offline")
        return wandb.init(dir=str(directory), settings=settings, reinit="create_new", config={"mine": 1})

    def check_live(self, directory: Path, live: Any) -> None:
        live.log({"mine": 1})
        live.finish()
        assert [values_of(row) for row in rows(directory)] == [{"loss": 0.5}, {"mine": 1}]
        assert live.config["lr"] == 0.1


def test_a_row_keeps_its_time_attempt_and_values_that_are_no_numbers(tmp_path: Path) -> None:
    tracker = WandbTracker(tmp_path)
    tracker.start("first", {"lr": 0.1}, project="p", tags=["a"], group="g", mode="offline")
    values = {"loss": float("nan"), "up": float("inf"), "down": float("-inf"), "none": None, "phase": "end"}
    tracker.write([LoggedRecord(time=1_700_000_000.2512345, attempt=2, values=values)])
    (row,) = rows(tmp_path)
    assert row["_timestamp"] == 1_700_000_000.2512345
    assert row["drivetrain/attempt"] == 2
    assert "drivetrain/step" not in row
    kept = {"loss": "NaN", "up": "Infinity", "down": "-Infinity", "none": None, "phase": "end"}
    assert values_of(row) == kept
    tracker.finish()
    (run,) = (message["run"] for message in read_log(tmp_path) if message["type"] == "run")
    assert (run["project"], run["run_group"], run["tags"], run["display_name"]) == ("p", "g", ["a"], "first")
    assert run["config"]["update"]["lr"] == 0.1


def test_a_stopped_run_goes_on_under_its_id_with_rows_behind_the_earlier_ones(tmp_path: Path) -> None:
    for records in (numbered_records(4)[:2], numbered_records(4)[2:]):
        tracker = WandbTracker(tmp_path)
        tracker.start("first", {})
        tracker.write(records)
        tracker.finish()
    runs = [message["run"]["run_id"] for message in read_log(tmp_path) if message["type"] == "run"]
    assert len(runs) == 2
    assert len(set(runs)) == 1
    assert [row["_step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


def test_a_disabled_run_writes_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    tracker = WandbTracker(tmp_path)
    tracker.start("first", {}, mode="disabled")
    tracker.log({"loss": 0.5}, step=1)
    tracker.finish()
    assert not rows(tmp_path)


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("killed", 255)])
@pytest.mark.default_cases("killed-255")
def test_the_file_holds_the_exit_code_of_how_the_run_ended(
    tmp_path: Path, state: RunState, code: int
) -> None:
    tracker = WandbTracker(tmp_path)
    tracker.start("first", {}, mode="offline")
    tracker.end(state)
    (message,) = [message for message in read_log(tmp_path) if message["type"] == "exit"]
    assert message["exit"]["exit_code"] == code


def test_names_that_wandb_has_for_itself_stay_apart_from_it(tmp_path: Path) -> None:
    tracker = WandbTracker(tmp_path)
    tracker.start("first", {"_wandb": 1, "lr": 0.1}, mode="offline")
    own = ("_step", "_timestamp", "_runtime", "_wandb", "drivetrain/step")
    tracker.write(
        [LoggedRecord(time=5.0, step=3, values={"loss": 0.5, **{name: n for n, name in enumerate(own)}})]
    )
    tracker.finish()
    (row,) = rows(tmp_path)
    assert (row["_timestamp"], row["drivetrain/step"], row["loss"]) == (5.0, 3, 0.5)
    assert [row[next(key for key in row if key.startswith(f"{name}-"))] for name in own] == [0, 1, 2, 3, 4]
