"""The command for a card, where there is none."""

import subprocess
import sys
from importlib.metadata import distributions, entry_points
from pathlib import Path

import pytest

from cuda.source_path import requirements, source_path

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("drivetrain.settings", "drivetrain.backends", "drivetrain.commands", "drivetrain.fp8_recipes")


def test_the_sources_announce_what_their_installation_announces(tmp_path: Path) -> None:
    folder, *sources = source_path(ROOT, tmp_path)
    assert {path.parent.name for path in sources} == {
        path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")
    }
    written = [point for each in distributions(path=[str(folder)]) for point in each.entry_points]
    for group in GROUPS:
        found = {(point.name, point.value) for point in written if point.group == group}
        assert found == {(point.name, point.value) for point in entry_points(group=group)}


def test_what_the_packages_need_is_named_as_it_is_imported() -> None:
    assert {"torch", "numpy", "yaml", "psutil", "xxhash"} <= set(requirements(ROOT))
    assert not [name for name in requirements(ROOT) if "drivetrain" in name or not name.isidentifier()]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["tests"], 2, "no CUDA device that torch can use: nothing was run"),
        (["tets"], 2, "'tets' is no half"),
    ],
)
def test_without_a_card_nothing_is_run_and_that_is_said(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(ROOT / "tools" / "cuda" / "run.py"), *words, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
