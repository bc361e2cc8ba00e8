import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from drivetrain_config import ConfigError
from drivetrain_config.plugins.installed import EntryPoint, entry_points

GROUP = "drivetrain.tried"


def install(folder: Path, distribution: str, text: str, *, kind: str = "dist-info") -> Path:
    info = folder / f"{distribution}-1.0.{kind}"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(text)
    return folder


def test_what_distributions_announce_is_found_by_group_and_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        f"[console_scripts]\nx = a:b\n\n[{GROUP}]\n# a comment\nsecond = os:path.join\nfirst=os:sep [extra]\n"
    )
    monkeypatch.syspath_prepend(install(tmp_path / "one", "some_thing", text))
    monkeypatch.syspath_prepend(
        install(tmp_path / "two", "old", f"[{GROUP}]\nthird = os:sep\n", kind="egg-info")
    )
    assert entry_points(GROUP) == (
        EntryPoint("first", "os:sep", "some_thing"),
        EntryPoint("second", "os:path.join", "some_thing"),
        EntryPoint("third", "os:sep", "old"),
    )
    assert entry_points("drivetrain.nobody") == ()


def test_the_object_is_imported_when_it_is_loaded() -> None:
    assert EntryPoint("join", "os:path.join", "python").load() is __import__("os").path.join
    assert EntryPoint("os", "os", "python").load() is __import__("os")


def test_the_first_distribution_of_a_name_hides_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "behind", "thing", f"[{GROUP}]\nname = os:linesep\n"))
    monkeypatch.syspath_prepend(install(tmp_path / "front", "Thing", f"[{GROUP}]\nname = os:sep\n"))
    assert [point.value for point in entry_points(GROUP)] == ["os:sep"]


def test_two_distributions_may_not_announce_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "one", f"[{GROUP}]\nname = os:sep\n")
    monkeypatch.syspath_prepend(install(tmp_path, "two", f"[{GROUP}]\nname = os:sep\n"))
    with pytest.raises(
        ConfigError, match=r"drivetrain\.tried: 'name' is announced by one and by two; uninstall one"
    ):
        entry_points(GROUP)


def test_a_zipped_distribution_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "thing.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        file.writestr("thing-1.0.dist-info/entry_points.txt", f"[{GROUP}]\nname = os:sep\n")
    monkeypatch.syspath_prepend(archive)
    assert entry_points(GROUP) == (EntryPoint("name", "os:sep", "thing"),)


def test_the_answer_is_that_of_importlib() -> None:
    from importlib.metadata import entry_points as of_importlib

    for group in ("drivetrain.settings", "drivetrain.commands", "console_scripts", "pytest11"):
        expected = {
            (point.name, point.value.partition("[")[0].strip()) for point in of_importlib(group=group)
        }
        assert {(point.name, point.value) for point in entry_points(group)} == expected


def test_a_plain_installation_is_read_without_importlib_metadata() -> None:
    source = (
        "import sys; from drivetrain_config import section_names; section_names();"
        "print(sorted({'importlib.metadata', 'email', 'zipfile', 'yaml', 'argparse', 'torch'} & set(sys.modules)))"
    )
    finished = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {source}"],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert finished.stdout.strip() == "[]"
