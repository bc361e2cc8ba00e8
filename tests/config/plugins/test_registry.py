from pathlib import Path

import pytest

from drivetrain_config import (
    ConfigError,
    Layers,
    commands,
    environ,
    resolve,
    section_names,
    sections,
)

ROOM = """\
from dataclasses import dataclass

@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    size: int = 1

NOT_A_SECTION = 3
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A distribution that announces two sections and a command; the name of its module."""
    module = f"third_party_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(ROOM)
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[drivetrain.settings]\nzz_good = {module}:Settings\nzz_odd = {module}:NOT_A_SECTION\n"
        f"[drivetrain.commands]\nzz_run = {module}.missing:run\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return module


def test_an_installed_section_is_found_by_itself(third_party: str) -> None:
    assert {"zz_good", "zz_odd"} <= set(section_names())
    assert sections(only={"zz_good"})["zz_good"].__module__ == third_party


def test_an_installed_section_has_variables_and_keys(third_party: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[zz_good]\nsize = 2\n")
    section = sections(only={"zz_good"})["zz_good"]
    assert resolve(section, section="zz_good", layers=Layers.of_process(file=file)).value == section(size=2)
    with environ.exported(DRIVETRAIN_ZZ_GOOD__SIZE="3"):
        assert resolve(section, section="zz_good", layers=Layers.read(file=file)).value == section(size=3)


def test_a_section_that_is_no_dataclass_is_refused(third_party: str) -> None:
    with pytest.raises(ConfigError, match=f"{third_party} announces .*:NOT_A_SECTION as section 'zz_odd'"):
        sections(only={"zz_odd"})


def test_a_commands_module_is_imported_only_when_it_is_chosen(third_party: str) -> None:
    found = commands()["zz_run"]
    assert found.value == f"{third_party}.missing:run"
    with pytest.raises(ModuleNotFoundError, match="missing"):
        found.load()
