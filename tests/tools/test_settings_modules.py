from pathlib import Path

from checks.settings_modules import foreign_imports, unimportable_settings
from checks.sources import parse
from checks.workspace import read_packages


def make_package(root: Path, name: str, *, init: str = "", settings: str = "") -> None:
    folder = root / "packages" / name
    module = folder / "src" / f"drivetrain_{name}"
    module.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "drivetrain-{name}"\nversion = "1"\n')
    (module / "__init__.py").write_text(init)
    (module / "settings.py").write_text(settings)


def test_a_third_party_or_a_sibling_in_settings_is_found() -> None:
    text = "import dataclasses\nimport torch.nn\nfrom drivetrain_a.errors import E\nfrom typing import Any\n"
    found = foreign_imports(parse("packages/a/src/drivetrain_a/settings.py", text))
    assert [finding.where.rpartition(":")[2] for finding in found] == ["2", "3"]
    assert foreign_imports(parse("packages/a/src/drivetrain_a/other.py", text)) == []


def test_settings_import_while_third_parties_are_blocked(tmp_path: Path) -> None:
    make_package(tmp_path, "clean", settings="from dataclasses import dataclass\n")
    make_package(tmp_path, "heavy", init="import torch\n", settings="x = 1\n")
    [finding] = unimportable_settings(tmp_path, read_packages(tmp_path).values())
    assert finding.where == "packages/heavy/src/drivetrain_heavy/settings.py"
    assert "needs torch" in finding.message


def test_a_package_without_settings_is_fine(tmp_path: Path) -> None:
    make_package(tmp_path, "bare")
    (tmp_path / "packages/bare/src/drivetrain_bare/settings.py").unlink()
    assert unimportable_settings(tmp_path, read_packages(tmp_path).values()) == []
