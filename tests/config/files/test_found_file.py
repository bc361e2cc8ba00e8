from dataclasses import dataclass, field
from pathlib import Path

import pytest

from drivetrain_config import ConfigError, Layers
from drivetrain_config.files.found_file import choose_file, find_file, settings_places


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    seed: int = field(default=0, metadata={"help": "a seed"})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a folder in it, which is the working folder."""
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "project" / "experiments" / "one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "experiments" / "one")
    return tmp_path / "project"


def environment(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home")}


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("probe:\n  seed: 1\n")
    return path


def test_places_are_the_folder_those_above_within_the_project_and_the_users(
    project: Path, tmp_path: Path
) -> None:
    places = settings_places(Path.cwd(), environment(tmp_path))
    assert [str(place) for place in places] == [
        "drivetrain.yaml",
        str(project / "experiments" / "drivetrain.yaml"),
        str(project / "drivetrain.yaml"),
        str(tmp_path / "home" / ".config" / "drivetrain" / "config.yaml"),
    ]


def test_nothing_above_is_looked_at_outside_a_project_or_from_its_top(project: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, project):
        assert len(settings_places(folder, environment(tmp_path))) == 2


def test_xdg_config_home_moves_the_users_folder(tmp_path: Path) -> None:
    (*_, user) = settings_places(tmp_path, {"XDG_CONFIG_HOME": "/etc/mine", "HOME": "/home/ada"})
    assert str(user) == "/etc/mine/drivetrain/config.yaml"
    assert len(settings_places(tmp_path, {})) == 1


def test_the_first_place_with_a_file_wins(project: Path, tmp_path: Path) -> None:
    for path, title in (
        (tmp_path / "home" / ".config" / "drivetrain" / "config.yaml", "the user's folder"),
        (project / "drivetrain.toml", "a folder above, within the project"),
        (project / "experiments" / "drivetrain.yml", "a folder above, within the project"),
        (Path("drivetrain.json"), "the working folder"),
    ):
        write(path)
        assert str(find_file(Path.cwd(), environment(tmp_path))) == f"{path}, found in {title}"


def test_two_files_in_one_place_are_refused(project: Path, tmp_path: Path) -> None:
    write(Path("drivetrain.yaml"))
    write(Path("drivetrain.toml"))
    with pytest.raises(
        ConfigError, match=r"drivetrain.yaml and drivetrain.toml: both are .* keep one, or .* --config"
    ):
        find_file(Path.cwd(), environment(tmp_path))


def test_a_named_file_beats_one_that_is_found_and_none_beats_both(project: Path, tmp_path: Path) -> None:
    write(Path("drivetrain.yaml"))
    named = choose_file("other.yaml", environment(tmp_path))
    assert named is not None
    assert named.place is None
    assert str(named) == "other.yaml, named by --config"
    assert choose_file("none", environment(tmp_path)) is None
    assert choose_file(None, environment(tmp_path)) is not None


def test_a_found_files_path_and_line_are_the_source_of_its_values(project: Path, tmp_path: Path) -> None:
    write(project / "drivetrain.yaml")
    layers = Layers.read(file=find_file(Path.cwd(), environment(tmp_path)), sections={"probe": Probe})
    (entry,) = layers.entries["probe", "seed"]
    assert str(entry.source) == f"{project / 'drivetrain.yaml'}:2"
    assert layers.file is not None
    assert layers.file.path == project / "drivetrain.yaml"
