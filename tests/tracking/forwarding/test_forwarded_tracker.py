import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain_tracking import JSONLTracker, TrackerGroup, TrackerStateError
from drivetrain_tracking.errors import UnknownTrackerError, ValueNotLoggableError
from drivetrain_tracking.forwarding.forwarded_tracker import DrainTime, ForwardedTracker

HERE = Path(__file__).parent

# Logs with a platform beside until it is killed.
TRAINER = """
import sys, time
from pathlib import Path
from drivetrain_tracking import JSONLTracker, TrackerGroup
from drivetrain_tracking.forwarding.forwarded_tracker import ForwardedTracker
log = JSONLTracker(sys.argv[1])
trackers = TrackerGroup([log, ForwardedTracker("odd_trackers:FileTracker", log.path)])
trackers.start("killed")
for step in range(5):
    trackers.log({"loss": 1.0}, step=step)
print("logged", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _trackers_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def group(folder: Path, kind: str, *, drain_seconds: float = 60) -> TrackerGroup:
    log = JSONLTracker(folder)
    drain_time = DrainTime(drain_seconds)
    kinds = (f"odd_trackers:{one}" for one in kind.split())
    return TrackerGroup([log, *(ForwardedTracker(one, log.path, drain_time=drain_time) for one in kinds)])


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def eventually(path: Path, wanted: list[str], *, seconds: float = 60) -> list[str]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (not path.exists() or lines(path) != wanted):
        time.sleep(0.05)
    return lines(path)


def test_a_platform_gets_the_run_from_a_process_beside(tmp_path: Path) -> None:
    trackers = group(tmp_path, "FileTracker")
    trackers.start("bytes", {"lr": 0.1}, options={"file": {"tag": "first"}})
    for step in range(4):
        trackers.log({"loss": 1.0}, step=step)
    trackers.finish()
    assert lines(tmp_path / "file.txt") == ["start bytes first", "0", "1", "2", "3", "finish"]


def test_a_resumed_run_goes_on_and_sends_nothing_twice(tmp_path: Path) -> None:
    for first in (0, 2):
        trackers = group(tmp_path, "FileTracker")
        trackers.start("bytes")
        for step in (first, first + 1):
            trackers.log({"loss": 1.0}, step=step)
        trackers.finish()
    assert lines(tmp_path / "file.txt") == [
        *("start bytes", "0", "1", "finish"),
        *("start bytes", "2", "3", "finish"),
    ]


@pytest.mark.parametrize("kind", ["SlowTracker", "RaisingTracker"])
def test_a_platform_that_does_not_take_values_costs_the_run_only_its_patience(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = group(tmp_path, kind, drain_seconds=0.5)
    trackers.start("bytes")
    for step in range(100):
        trackers.log({"loss": 1.0}, step=step)
    with caplog.at_level(logging.WARNING):
        trackers.finish()
    assert f"drivetrain track replay {tmp_path} --to odd_trackers:{kind} sends the rest" in caplog.text
    assert len(lines(tmp_path / "log.jsonl")) == 102


def test_platforms_that_are_down_share_the_time_at_the_end(tmp_path: Path) -> None:
    trackers = group(tmp_path, "SlowTracker RaisingTracker", drain_seconds=1.0)
    trackers.start("bytes")
    trackers.log({"loss": 1.0}, step=0)
    drain_time = trackers.get("slow").drain_time
    trackers.finish()
    assert drain_time is trackers.get("raising").drain_time
    assert drain_time.left() == 0


@pytest.mark.slow
def test_a_crash_of_the_platforms_library_ends_neither_the_run_nor_the_delivery(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = group(tmp_path, "CrashingTracker")
    trackers.start("bytes")
    for step in range(5):
        trackers.log({"loss": 1.0}, step=step)
    with caplog.at_level(logging.WARNING):
        wanted = ["0", "1", "2", "3", "4"]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and _steps(tmp_path / "crashing.txt") != wanted:
            time.sleep(0.05)
        trackers.finish()
    assert _steps(tmp_path / "crashing.txt") == wanted
    assert "the process that writes to 'crashing' ended with signal 11 and is started again" in caplog.text


def _steps(path: Path) -> list[str]:
    return [line for line in lines(path) if line.isdigit()] if path.exists() else []


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)], cwd=HERE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_values_of_a_killed_run_are_delivered_all_the_same(
    tmp_path: Path, trainer: "subprocess.Popen[str]"
) -> None:
    assert trainer.stdout is not None
    trainer.stdout.readline()
    os.kill(trainer.pid, signal.SIGKILL)
    wanted = ["start killed", "0", "1", "2", "3", "4", "finish"]
    assert eventually(tmp_path / "file.txt", wanted) == wanted


def test_bad_input_is_told_before_a_process_is_started(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with pytest.raises(UnknownTrackerError, match="say module:Class"):
        ForwardedTracker("odd_trackers:NoTracker", log)
    tracker = ForwardedTracker("odd_trackers:FileTracker", log)
    with pytest.raises(ValueNotLoggableError, match="its options are plain values"):
        tracker.start("run", {}, tag=object())
    with pytest.raises(TypeError, match=r"takes no tags; of its own it takes tag"):
        TrackerGroup([tracker]).start("run", options={"file": {"tags": "x"}})
    tracker.finish()
    assert not (tmp_path / "file.txt").exists()


def test_it_is_started_once(tmp_path: Path) -> None:
    log = JSONLTracker(tmp_path)
    log.start("run", {})
    tracker = ForwardedTracker("odd_trackers:FileTracker", log.path)
    tracker.start("run", {})
    with pytest.raises(TrackerStateError, match="finish"):
        tracker.start("run", {})
    log.finish()
    tracker.finish()


def test_the_process_beside_does_not_join_a_run_of_the_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOINS_A_RUN", "1234")
    trackers = group(tmp_path, "JoiningTracker")
    trackers.start("bytes")
    trackers.finish()
    assert lines(tmp_path / "joining.txt") == ["start bytes", "JOINS_A_RUN is None", "finish"]
