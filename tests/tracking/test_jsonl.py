import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from drivetrain_tracking import JSONLTracker, TrackerStateError, ValueNotLoggableError
from drivetrain_tracking.testing import TrackerContract


def records(directory: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    return [
        json.loads(line, parse_constant=refuse) for line in (directory / "log.jsonl").read_text().splitlines()
    ]


class JSONLContract(TrackerContract):
    def make(self, directory: Path) -> JSONLTracker:
        return JSONLTracker(directory)

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        found: list[tuple[int | None, Mapping[str, object]]] = []
        for record in records(directory):
            if "event" not in record:
                assert len(record.pop("crc")) == 8
                step = record.pop("step", None)
                assert step is None or isinstance(step, int)
                assert isinstance(record.pop("time"), float)
                found.append((step, record))
        return found


def test_it_passes_the_contract_of_trackers(tmp_path: Path) -> None:
    assert len(JSONLContract().check_all(tmp_path)) == 6


def test_the_file_tells_the_run_and_its_configuration(tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path / "new" / "folder")
    tracker.start("bytes", {"lr": 0.1, "data": Path("x")})
    tracker.log({"loss": 1.0})
    tracker.finish()
    start, log, finish = records(tmp_path / "new" / "folder")
    assert (start["event"], start["run"], start["config"]) == ("start", "bytes", {"lr": 0.1, "data": "x"})
    assert "step" not in log
    assert finish["event"] == "finish"


def test_numbers_that_json_lacks_are_strings_that_float_reads(tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path)
    tracker.start("run", {"limit": float("inf")})
    tracker.log({"loss": float("nan"), "norms": [float("inf"), {"low": float("-inf")}]}, step=1)
    tracker.finish()
    start, log, _ = records(tmp_path)
    assert start["config"] == {"limit": "Infinity"}
    assert (log["loss"], log["norms"]) == ("NaN", ["Infinity", {"low": "-Infinity"}])


@pytest.mark.parametrize("torn_bytes", [1, 10, 200_000])
def test_a_resumed_run_cuts_the_line_that_a_kill_tore(tmp_path: Path, torn_bytes: int) -> None:
    for step in (1, 2):
        tracker = JSONLTracker(tmp_path)
        tracker.start("run", {})
        tracker.log({"loss": 0.5}, step=step)
        tracker.finish()
        with (tmp_path / "log.jsonl").open("ab") as file:
            file.write(b"{" * torn_bytes)
    tracker = JSONLTracker(tmp_path)
    tracker.start("run", {})
    tracker.finish()
    assert [record.get("step") for record in records(tmp_path)] == [None, 1, None, None, 2, None, None, None]


@pytest.mark.parametrize("name", ["step", "time", "event", "attempt", "media", "crc"])
def test_names_of_the_file_itself_are_refused(tmp_path: Path, name: str) -> None:
    tracker = JSONLTracker(tmp_path)
    tracker.start("run", {})
    with pytest.raises(ValueNotLoggableError, match=rf"values\['{name}'\]: the name is the log's own"):
        tracker.log({name: 1})
    tracker.finish()


def test_calls_out_of_order_say_what_to_do(tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path)
    with pytest.raises(TrackerStateError, match=r"log\(\) before start\(\): call start"):
        tracker.log({"loss": 1})
    tracker.start("run", {})
    with pytest.raises(TrackerStateError, match=r"start\(\) again.*finish\(\) first"):
        tracker.start("run", {})
    tracker.finish()


def test_importing_it_brings_no_third_party() -> None:
    source = (
        "import sys; before = set(sys.modules); import drivetrain_tracking as t; t.JSONLTracker; t.TrackerGroup\n"
        "found = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(found - set(sys.stdlib_module_names)))"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout.strip() == "['drivetrain_messages', 'drivetrain_tracking']", done.stderr
