"""A section of settings that another installed package registers, in the commands that ask, show and check."""

from pathlib import Path

import pytest

SECTION = '''
from dataclasses import dataclass, field
from typing import Literal

def ask_bowls(known):
    return {"value": 3, "why": "three cats live here"}

@dataclass(frozen=True, kw_only=True)
class Cats:
    """The cats."""

    bowls: int = field(default=1, metadata={"help": "Number of bowls.", "ask": "cats_settings:ask_bowls"})
    food: Literal["fish", "mice"] = field(default="fish", metadata={"help": "What is in them."})
'''


def installed(folder: Path) -> dict[str, str]:
    """Return the variables with which a package `cats` is installed."""
    announced = folder / "cats-1.0.dist-info"
    announced.mkdir(parents=True)
    (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: cats\nVersion: 1.0\n")
    (announced / "entry_points.txt").write_text("[drivetrain.settings]\ncats = cats_settings:Cats\n")
    (folder / "cats_settings.py").write_text(SECTION)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_its_questions_flags_and_checks_appear_by_themselves(drivetrain, tmp_path: Path) -> None:
    package = installed(tmp_path / "packages")
    asked = drivetrain("config", "--yes", "--output", "cats.yaml", environment=package)
    assert asked.returncode == 0, asked.stderr
    text = (tmp_path / "cats.yaml").read_text()
    assert "cats:" in text
    assert "bowls: 3" in text
    assert "three cats live here" in text
    changed = drivetrain("config", "update", "cats.yaml", "--set", "cats.food=mice", environment=package)
    assert "cats.food: unset -> mice" in changed.stdout
    refused = drivetrain("config", "update", "cats.yaml", "--set", "cats.food=birds", environment=package)
    assert refused.returncode != 0
    assert "fish" in refused.stderr
    assert "--cats-bowls" in drivetrain("launch", "--help", environment=package).stdout
    gone = drivetrain("config", "validate", "cats.yaml")
    assert gone.returncode != 0
    assert "there is no section 'cats'" in gone.stdout + gone.stderr
