"""Which versions of torch and Python words ask for, and what runs where a Python is missing."""

import tomllib
from pathlib import Path

import pytest

from checks.environments import find_python
from checks.versions import LOCKED, RUNNING, SELECTION, TABLE, WORDS, Version, choose, place

ROOT = Path(__file__).resolve().parents[2]


def told(*words: str) -> list[str]:
    return [f"{version.torch} {version.python}" for version in choose(words)]


def test_without_a_word_the_whole_table_is_tried() -> None:
    assert choose(()) == TABLE


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["2.11"], ["2.11 3.12"]),
        (["2.9", LOCKED], ["2.9 3.11", "locked 3.13"]),
        (["3.13"], ["2.13 3.13", "locked 3.13"]),
        (["3.11", "2.13", "2.9"], ["2.9 3.11", "2.13 3.11"]),
    ],
)
def test_words_narrow_the_table_or_pair_versions(words: list[str], expected: list[str]) -> None:
    assert told(*words) == expected


def test_one_version_is_drawn_the_same_again_and_from_what_other_words_leave() -> None:
    (drawn,) = choose(["drawn"])
    assert drawn in TABLE
    assert choose(["drawn"]) == (drawn,)
    assert told("drawn", "2.9") == ["2.9 3.11"]
    assert told("drawn", "3.13")[0] in told("3.13")


def test_another_version_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'2.8' is no version that is tried; there are 2.9, 2.11"):
        choose(["2.8"])


def test_no_word_names_two_things() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert {word[0] for word in WORDS} == {"2", "3", "l", "d"}


def test_the_table_begins_at_the_oldest_that_the_packages_allow() -> None:
    settings = tomllib.loads((ROOT / "packages/state/pyproject.toml").read_text())["project"]
    assert f"torch>={TABLE[0].torch}" in settings["dependencies"]
    assert settings["requires-python"] == f">={TABLE[0].python}"


def test_where_a_python_is_missing_its_torch_runs_under_another_unless_it_was_asked_for() -> None:
    newest = Version(torch="2.13", python="3.99")
    runs, notes = place([TABLE[0], newest], (), [TABLE[0].python, RUNNING])
    assert runs == [TABLE[0], Version(torch="2.13", python=RUNNING)]
    assert notes == [f"no Python 3.99 on this machine: torch 2.13 on Python {RUNNING} takes its place"]
    runs, notes = place([newest], ["3.99"], [RUNNING])
    assert runs == []
    assert notes == ["no Python 3.99 on this machine: torch 2.13 on Python 3.99 is not run"]


def test_a_python_is_found_where_there_is_one() -> None:
    found = find_python(RUNNING)
    assert found is None or found.exists()
    assert find_python("3.99") is None


def test_every_file_of_the_selection_exists_once() -> None:
    assert len(set(SELECTION)) == len(SELECTION)
    assert [name for name in SELECTION if not (ROOT / name).is_file()] == []
