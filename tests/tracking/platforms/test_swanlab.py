import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain_tracking.platforms.swanlab import SwanLabTracker, chosen_mode
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium, flat_values
from optional_modules import import_later
from tracking.platforms.platform_tests import QuietPlatformTests, started

swanlab = pytest.importorskip("swanlab")
store = import_later("swanlab.sdk.internal.core_python.store")
protocol = import_later("swanlab.proto.swanlab.record.v1.record_pb2")


@pytest.fixture(autouse=True)
def without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where SwanLab looks for keys
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SWANLAB_")]:
        monkeypatch.delenv(name)


class TestSwanLab(QuietPlatformTests):
    tracker = SwanLabTracker
    libraries = (
        "swanlab",
        "requests",
        "watchdog.observers",
        "swanlab.sdk.internal.bus.events",
        "swanlab.sdk.internal.core_python.store",
    )
    counts_held = False

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        return [
            (step, {name.removeprefix("attempt-2/"): value for name, value in values.items()})
            for step, values in read(directory)
        ]

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return {k: v if isinstance(v, str) else float(v) for k, v in flat_values(values).items()}

    def prepare_kills(self, directory: Path) -> Mapping[str, Any]:
        return {"environment": {"HOME": str(directory)}, "options": {"mode": "offline"}}

    def killed_rows(self, directory: Path) -> Sequence[Any]:
        return read(directory)

    def check_media(self, directory: Path, tracker: Any, media: Mapping[str, StoredMedium]) -> None:
        found = {one.key: one for one in stored(directory, "media")}
        assert content(directory, found["video"]) == media["video"].path.read_bytes()
        pillow = pytest.importorskip("PIL.Image")
        for kind in ("image", "figure"):
            (file,) = {*directory.glob(f"swanlog/*/media/*/{found[kind].value.items[0].filename}")}
            assert pillow.open(file).getpixel((0, 0))[:3] == (250, 0, 0)
            assert found[kind].value.items[0].caption == "a caption"
        assert content(directory, found["text"]) == b"<b>said</b>"
        table = json.loads(content(directory, found["table"]))
        assert table["rowData"] == [{"name": "a", "n": 1}, {"name": "b", "n": 2.5}]
        bars = json.loads(content(directory, found["histogram"]))["series"][0]["data"]
        assert [bar["value"] if isinstance(bar, dict) else bar for bar in bars] == [1, 4, 2]
        saved = [one for one in stored(directory, "save") if one.name == "artifact-1-7.txt"]
        assert [Path(one.source_path).read_text() for one in saved] == ["an artifact"]

    def open_live(self, directory: Path) -> Any:
        return swanlab.init(
            mode="offline", name="mine", log_dir=str(directory / "swanlog"), config={"seed": 1}
        )

    def check_live(self, directory: Path, live: Any) -> None:
        assert (live.alive, dict(live.config)) == (True, {"seed": 1, "lr": 0.1})
        live.log({"loss": 0.25}, step=2)
        live.finish()
        rows = [(step, values) for step, values in read(directory) if "loss" in values]
        assert rows == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]


def stored(directory: Path, kind: str) -> list[Any]:
    """Return the records of a kind that SwanLab's own reader finds in the files of all starts."""
    found = []
    for file in sorted(directory.glob("swanlog/*/*.swanlab")):
        if file.stat().st_size < store.LEVELDBLOG_HEADER_LEN:
            continue  # killed before the header was written
        reader = store.DataStoreReader()
        reader.open(file)
        records = [protocol.Record.FromString(line) for line in reader]
        found += [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]
        reader.close()
    return found


def read(directory: Path) -> list[tuple[int, dict[str, object]]]:
    """Return the steps and values of a run by the times of the values."""
    found: dict[tuple[int, int], dict[str, object]] = {}
    for one in stored(directory, "scalar"):
        values = found.setdefault((one.timestamp.ToNanoseconds(), one.step), {})
        before = values.setdefault(one.key, one.value.number)
        assert before == one.value.number or math.isnan(one.value.number), "one value for a name and a time"
    for one in stored(directory, "media"):
        values = found.setdefault((one.timestamp.ToNanoseconds(), one.step), {})
        values[one.key] = content(directory, one).decode()
    return [(step, values) for (_, step), values in sorted(found.items())]


def content(directory: Path, record: Any) -> bytes:
    (item,) = record.value.items
    (file,) = directory.glob(f"swanlog/*/media/*/{item.filename}")
    return file.read_bytes()


def test_swanlab_knows_the_run_its_configuration_and_the_plan(tmp_path: Path) -> None:
    told = {"project": "trials", "group": "first", "tags": ("short",), "description": "a test"}
    tracker = started(SwanLabTracker(tmp_path), **told)
    tracker.record_plan({"world_size": 2})
    tracker.finish()
    (start,) = stored(tmp_path, "start")
    assert (start.project, start.name, start.group, start.tags) == ("trials", "run", "first", ["short"])
    (config,) = tmp_path.glob("swanlog/*/files/config.yaml")
    text = config.read_text()
    assert all(part in text for part in ("lr", "width", "world_size"))
    assert str(config) in [save.source_path for save in stored(tmp_path, "save")]


def test_a_stopped_run_goes_on_with_its_id(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = started(SwanLabTracker(tmp_path))
        tracker.log({"loss": 1.0 / step}, step=step)
        tracker.log({"tokens": 5})
        tracker.finish()
    assert len({start.id for start in stored(tmp_path, "start")}) == 1
    assert [step for step, _ in read(tmp_path)] == [1, 2, 2, 3]


def test_numbers_that_are_none_stay_and_none_is_left_out(tmp_path: Path) -> None:
    tracker = started(SwanLabTracker(tmp_path))
    tracker.log({"loss": math.nan, "norm": -math.inf, "best": None, "done": True}, step=2)
    tracker.finish()
    ((step, values),) = read(tmp_path)
    assert math.isnan(values.pop("loss"))
    assert (step, values) == (2, {"norm": -math.inf, "done": 1.0})


def test_a_second_value_for_a_step_and_one_of_another_type_get_numbers(tmp_path: Path) -> None:
    tracker = started(SwanLabTracker(tmp_path))
    rows = ((1.0, 1, 0.5), (2.0, 1, 0.25), (3.0, 2, "diverged"))
    tracker.write([LoggedRecord(time=time, step=step, values={"loss": loss}) for time, step, loss in rows])
    tracker.log({"loss": 0.125}, step=1)
    tracker.finish()
    assert read(tmp_path) == [
        (1, {"loss": 0.5}),
        (1, {"loss (2)": 0.25}),
        (2, {"loss (3)": "diverged"}),
        (1, {"loss (4)": 0.125}),
    ]


def test_a_disabled_swanlab_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "disabled")
    tracker = started(SwanLabTracker(tmp_path))
    tracker.log({"loss": 0.5}, step=1)
    tracker.finish()
    assert not (tmp_path / "swanlog").exists()


@pytest.mark.parametrize("asked", [None, "online", "offline", "local"])
@pytest.mark.parametrize("configured", ["online", "offline", "local", "disabled"])
@pytest.mark.parametrize("has_key", [False, True])
def test_a_run_is_offline_where_nothing_else_is_said_and_no_key_is_there(
    asked: str | None, configured: str, has_key: bool
) -> None:
    mode = chosen_mode(asked, configured, has_key=has_key)
    if asked:
        assert mode == asked
    elif configured == "online":
        assert mode == ("online" if has_key else "offline")
    else:
        assert mode == configured


@pytest.mark.parametrize("state", ["finished", "failed", "killed"])
def test_swanlab_shows_how_a_run_ended(tmp_path: Path, state: RunState) -> None:
    tracker = SwanLabTracker(tmp_path)
    tracker.start("run", {})
    tracker.end(state)
    kinds = pytest.importorskip("swanlab.proto.swanlab.run.v1.run_pb2").RunState
    word = {"finished": "FINISHED", "failed": "CRASHED", "killed": "ABORTED"}[state]
    assert [kinds.Name(one.state).rpartition("_")[2] for one in stored(tmp_path, "finish")] == [word]


def test_names_that_swanlab_does_not_take_stay_apart(tmp_path: Path) -> None:
    tracker = SwanLabTracker(tmp_path)
    tracker.start("run", {"plan": 1})
    names = [
        "loss",
        "loss/",
        "loss.",
        "loss (2)",
        "attempt-2/loss",
        "x" * 300,
        "x" * 301,
        "a\nb",
        "a-b",
        "..",
    ]
    tracker.log({name: float(n) for n, name in enumerate(names)}, step=1)
    tracker.finish()
    ((_, values),) = read(tmp_path)
    assert sorted(values.values()) == [float(n) for n in range(len(names))]
    assert (values["loss"], values["a-b"]) == (0.0, 8.0)
