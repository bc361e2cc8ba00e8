import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drivetrain_tracking import (
    JSONLTracker,
    MissingLibraryError,
    UnknownTrackerError,
    chosen_names,
    make_tracker,
    make_trackers,
    tracker_names,
)


def test_ours_is_there(tmp_path: Path) -> None:
    tracker = make_tracker("jsonl", tmp_path)
    assert isinstance(tracker, JSONLTracker)
    assert tracker.path == tmp_path / "log.jsonl"
    assert "jsonl" in tracker_names()


def test_an_unknown_one_is_answered_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownTrackerError,
        match=r"'wandbb': no installed package brings .*'jsonl'.* did you mean wandb",
    ):
        make_tracker("wandbb", tmp_path)


def test_of_an_installed_platform_the_error_says_that_it_is_installed_and_what_to_do(tmp_path: Path) -> None:
    told = r"the platform 'pytest' is installed, but no installed .*log_with=\[MyTracker\(\.\.\.\)\]"
    with pytest.raises(UnknownTrackerError, match=told):
        make_tracker("pytest", tmp_path)


@pytest.mark.parametrize("name", sorted({*tracker_names()} - {"jsonl"}))
def test_of_a_platform_that_is_not_installed_the_error_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = {"comet": "comet_ml"}.get(name, name)
    monkeypatch.setitem(sys.modules, library, None)  # as Python marks a module that cannot be imported
    told = rf"'{name}' needs the library '{library}', .*: pip install 'drivetrain-tracking\[{name}\]'"
    with pytest.raises(MissingLibraryError, match=told):
        make_tracker(name, tmp_path)


def test_all_stands_for_every_tracker_whose_library_is_installed() -> None:
    libraries = {"comet": "comet_ml"}
    usable = {name for name in tracker_names() if name == "jsonl" or find_spec(libraries.get(name, name))}
    assert set(chosen_names(["all"])) == usable
    assert set(chosen_names(["mine", "all", "jsonl"])) == {"mine", *usable}
    assert chosen_names(["jsonl"]) == ("jsonl",)


def test_another_packages_tracker_is_found_by_its_entry_point(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "their_tracker.py").write_text(
        "class Their:\n"
        "    name = 'their'\n"
        "    on_all_ranks = False\n"
        "    def __init__(self, directory): self.at = directory\n"
    )
    metadata = tmp_path / "their_tracker-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: their-tracker\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[drivetrain.trackers]\ntheir = their_tracker:Their\n")
    monkeypatch.syspath_prepend(tmp_path)
    tracker = make_tracker("their", tmp_path / "runs")
    monkeypatch.delitem(sys.modules, "their_tracker")
    assert tracker.name == "their"
    assert set(tracker_names()) >= {"jsonl", "their"}


@pytest.mark.parametrize("names", ["jsonl", [3]])
def test_names_are_a_list_of_strings(tmp_path: Path, names: Any) -> None:
    with pytest.raises(TypeError, match=r"give a list of names, such as \["):
        make_trackers(names, tmp_path)
