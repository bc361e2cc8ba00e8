from pathlib import Path

import pytest

from drivetrain_tracking import JSONLTracker
from drivetrain_tracking.forwarding.replay import ReplayArguments, run

FILE = "odd_trackers:FileTracker"


@pytest.fixture(autouse=True)
def _trackers_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    log = JSONLTracker(tmp_path)
    log.start("bytes", {"lr": 0.1})
    for step in range(3):
        log.log({"loss": 1.0}, step=step)
    log.finish()
    return tmp_path


def test_what_was_not_sent_is_sent_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ReplayArguments(folder=folder, to=FILE)) == 0
    assert capsys.readouterr().out == f"5 records sent to {FILE}\n"
    sent = (folder / "file.txt").read_text().splitlines()
    assert sent == ["start bytes", "0", "1", "2", "finish"]
    assert run(ReplayArguments(folder=folder, to=FILE)) == 0
    assert capsys.readouterr().out == f"0 records sent to {FILE}\n"
    assert (folder / "file.txt").read_text().splitlines() == sent


def test_the_good_part_of_a_damaged_log_is_sent(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = folder / "log.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"step": 1', b'"step": 7'))
    assert run(ReplayArguments(folder=folder, to=FILE)) == 0
    assert capsys.readouterr().out == f"4 records sent to {FILE}, 1 damaged lines passed over\n"


def test_a_platform_that_stays_down_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ReplayArguments(folder=folder, to="odd_trackers:RaisingTracker", patience_seconds=0.1)) == 1
    assert "1 records sent to odd_trackers:RaisingTracker; the rest was not taken" in capsys.readouterr().out


def test_bad_input_is_told_in_a_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ReplayArguments(folder=tmp_path / "nowhere", to=FILE)) == 2
    assert "there is no log.jsonl in it" in capsys.readouterr().err
    assert run(ReplayArguments(folder=folder, to="wandbb")) == 2
    assert "tracker 'wandbb'" in capsys.readouterr().err
    before = (folder / "log.jsonl").read_bytes()
    assert run(ReplayArguments(folder=folder, to="jsonl")) == 2
    assert "where the records are already" in capsys.readouterr().err
    assert (folder / "log.jsonl").read_bytes() == before


def test_from_the_start_only_what_the_platform_lacks_is_sent(folder: Path, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    assert run(ReplayArguments(folder=folder, to="tensorboard")) == 0
    files = sorted((folder / "tensorboard").rglob("events.*"))
    assert run(ReplayArguments(folder=folder, to="tensorboard", from_start=True)) == 0
    files = sorted((folder / "tensorboard").rglob("events.*"))
    steps = [
        event.step
        for file in files
        for event in loader.EventFileLoader(str(file)).Load()
        if event.wall_time > 1
    ]
    assert [step for step in steps if step in (0, 1, 2)].count(2) == 1
