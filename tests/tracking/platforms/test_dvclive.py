import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_tracking.platforms.conventions import CONVENTIONS
from drivetrain_tracking.platforms.dvclive import DVCLiveTracker, free_name
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium, flat_values
from optional_modules import import_later
from tracking.platforms.platform_tests import QuietPlatformTests, started

dvclive = pytest.importorskip("dvclive")
utils = import_later("dvclive.utils")


@pytest.fixture(autouse=True)
def outside_any_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # DVCLive makes a repository of DVC of a Git repository that it runs in


class TestDVCLive(QuietPlatformTests):
    tracker = DVCLiveTracker
    libraries = ("dvclive", "dvc.repo", "dvc.scm", "scmrepo.exceptions", "ruamel.yaml", "dvc_studio_client")

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        return read_numbers(directory / "dvclive" / "contract")

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return {name: number(value) for name, value in flat_values(values).items()}

    def killed_rows(self, directory: Path) -> Sequence[Any]:
        rows = read_numbers(directory / "dvclive" / "killed")
        summary = json.loads((directory / "dvclive" / "killed" / "metrics.json").read_text())
        assert (summary["step"], summary["loss"]) == (rows[-1][0], rows[-1][1]["loss"])
        return rows

    def media_records(self, media: Mapping[str, StoredMedium]) -> list[LoggedRecord]:
        return [LoggedRecord(time=2.0 + n, step=7, attempt=n, media=media) for n in (1, 2)]

    def check_media(self, directory: Path, tracker: Any, media: Mapping[str, StoredMedium]) -> None:
        plots = directory / "dvclive" / "run" / "plots"
        pillow = pytest.importorskip("PIL.Image")
        for name in ("image/7", "figure/7", "attempt-2/image/7"):
            assert pillow.open(plots / "images" / f"{name}.png").getpixel((0, 0)) == (250, 0, 0)
        rows = utils.parse_json(plots / "custom" / "histogram" / "7.json")
        assert rows == [{"from": 0.0, "count": 1}, {"from": 1.0, "count": 4}, {"from": 2.0, "count": 2}]

    def open_live(self, directory: Path) -> Any:
        live = dvclive.Live(str(directory / "mine"), save_dvc_exp=False, dvcyaml=None)
        live.log_metric("before", 1.0)
        return live

    def check_live(self, directory: Path, live: Any) -> None:
        live.step = 2
        live.log_metric("loss", 0.25)
        assert read_numbers(directory / "mine") == [
            (0, {"before": 1}),
            (1, {"loss": 0.5}),
            (2, {"loss": 0.25}),
        ]
        live.end()


def number(value: object) -> float | object:
    try:
        return float(value)  # type: ignore[arg-type]
    except ValueError:
        return value


def read_numbers(folder: Path) -> list[tuple[int, dict[str, object]]]:
    return [(step, {name: number(one) for name, one in values.items()}) for step, values in read(folder)]


def read(folder: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the steps and values as DVCLive's own reader of its tables finds them, attempt after attempt."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for table in sorted((folder / "plots" / "metrics").rglob("*.tsv")):
        name = str(table.relative_to(folder / "plots" / "metrics").with_suffix(""))
        attempt, name = name.split("/", 1) if name.startswith("attempt-") else ("", name)
        for row in utils.parse_tsv(table):
            values = found.setdefault((attempt, int(row["step"])), {})
            assert name not in values, "one row for a step"
            values[name] = row[name.rpartition("/")[2]]
    return [(step, values) for (_, step), values in sorted(found.items(), key=lambda one: one[0])]


def test_dvc_reads_parameters_plan_and_summary(tmp_path: Path) -> None:
    tracker = started(DVCLiveTracker(tmp_path))
    tracker.record_plan({"world_size": 2})
    tracker.log({"loss": 0.5, "eval": {"loss": 0.75}}, step=3)
    tracker.finish()
    folder = tmp_path / "dvclive" / "run"
    parameters = pytest.importorskip("dvclive.serialize").load_yaml(folder / "params.yaml")
    assert parameters == {"lr": 0.1, "model": {"width": 8}, "plan": {"world_size": 2}}
    summary = json.loads((folder / "metrics.json").read_text())
    assert summary == {"loss": 0.5, "eval": {"loss": 0.75}, "step": 3}
    listed = pytest.importorskip("dvclive.serialize").load_yaml(folder / "dvc.yaml")
    assert listed["plots"] == [{"plots/metrics": {"x": "step"}}]


def test_numbers_that_are_none_are_words_and_none_is_left_out(tmp_path: Path) -> None:
    tracker = started(DVCLiveTracker(tmp_path))
    tracker.log({"loss": math.nan, "norm": -math.inf, "best": None, "done": True}, step=2)
    tracker.finish()
    assert read(tmp_path / "dvclive" / "run") == [(2, {"loss": "nan", "norm": "-inf", "done": "1"})]


def test_a_name_that_is_a_folder_of_another_gets_dots(tmp_path: Path) -> None:
    for values in ({"loss": 1.0, "loss/val": 2.0, "acc/val": 3.0, "acc": 4.0}, {"loss/val": 5.0, "acc": 6.0}):
        tracker = started(DVCLiveTracker(tmp_path))
        tracker.log(values, step=int(values["loss/val"]))
        tracker.finish()
    assert read(tmp_path / "dvclive" / "run") == [
        (2, {"loss": "1.0", "loss.val": "2.0", "acc/val": "3.0", "acc.value": "4.0"}),
        (5, {"loss.val": "5.0", "acc.value": "6.0"}),
    ]


@given(st.text(max_size=20), st.frozensets(st.text(alphabet="ab/.", min_size=1, max_size=6), max_size=4))
def test_no_name_leaves_the_folder(name: str, taken: frozenset[str]) -> None:
    parts = free_name(CONVENTIONS["dvclive"].values.name_of(name), taken).split("/")
    assert all(part and part not in (".", "..") and "\0" not in part for part in parts)


@pytest.mark.slow
def test_a_run_is_saved_as_an_experiment_of_dvc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NAME", "a tester"), ("EMAIL", "tester@example.org")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.chdir(repository)
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    tracker = started(DVCLiveTracker(repository), save_experiment=True)
    tracker.log({"loss": 0.5}, step=1)
    tracker.finish()
    with pytest.importorskip("dvc.repo").Repo(str(repository)) as repo:
        (saved,) = repo.experiments.ls().values()
    assert [name for name, _ in saved] == ["run"]


def test_a_run_that_was_not_finished_says_so_until_it_goes_on(tmp_path: Path) -> None:
    for state in ("failed", "finished"):
        tracker = DVCLiveTracker(tmp_path)
        tracker.start("run", {"lr": 0.1, "plan": 3})
        tracker.end(state)
        told = (tmp_path / "dvclive" / "run" / "params.yaml").read_text()
        assert ("state: failed" in told) == (state == "failed")
    assert "lr: 0.1" in told


def test_names_that_would_be_one_file_stay_apart_also_after_a_resume(tmp_path: Path) -> None:
    names = ("recall@10", "recall#10", "Loss", "loss", "loss/val", "loss.val", "loss/..", "x" * 300, "..")
    for step in range(2):
        tracker = DVCLiveTracker(tmp_path)
        tracker.start("run", {})
        tracker.log({name: n for n, name in enumerate(names)}, step=step)
        tracker.finish()
    tables = read(tmp_path / "dvclive" / "run")
    assert [sorted(values.values()) for _, values in tables] == [[str(n) for n in range(len(names))]] * 2
    folded = [str(one).casefold() for one in (tmp_path / "dvclive").rglob("*.tsv")]
    assert len(folded) == len(set(folded)) == len(names)
