import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from check import choose
from checks.xla import NUM_DEVICES, PROJECT, TESTS, variables, why_not_here

ROOT = Path(__file__).resolve().parents[2]


def read(file: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / file).read_text())


def locked(file: str) -> dict[str, str]:
    return {package["name"]: package.get("version", "") for package in read(file)["package"]}


@pytest.mark.parametrize(
    ("system", "machine", "python", "message"),
    [
        ("darwin", "arm64", (3, 11), "there is no torch-xla for darwin on arm64, only for linux on x86_64"),
        ("linux", "aarch64", (3, 11), "there is no torch-xla for linux on aarch64, only for linux on x86_64"),
        ("linux", "x86_64", (3, 14), "there is no torch-xla for Python 3.14, only below 3.14"),
    ],
)
def test_other_machines_are_skipped_with_the_reason(
    system: str, machine: str, python: tuple[int, int], message: str
) -> None:
    assert why_not_here(system, machine, python, ROOT) == message


def test_xla_makes_the_devices_of_the_processor() -> None:
    chosen = variables(ROOT / PROJECT, "4")
    assert (chosen["PJRT_DEVICE"], chosen["CPU_NUM_DEVICES"]) == ("CPU", "4")
    assert chosen["UV_PROJECT_ENVIRONMENT"] == str(ROOT / PROJECT / ".venv")


def test_it_is_asked_for_by_name_alone_and_drawn() -> None:
    assert [check.name for check in choose(["xla"], known_packages=())] == ["xla"]
    assert [check.name for check in choose(["xla", "drawn"], known_packages=())] == ["xla"]
    assert "xla" not in [check.name for check in choose([], known_packages=())]
    assert [check.name for check in choose(["alone", "xla"], known_packages=("xla",))] == ["alone"]
    assert [check.name for check in choose(["xla"], known_packages=("xla",))] == ["xla"]
    assert any((ROOT / TESTS).glob("test_*.py"))
    assert NUM_DEVICES == ("1", "2", "4")


def test_its_lock_is_up_to_date_with_the_packages() -> None:
    """Else: uv lock --project envs/xla."""
    finished = subprocess.run(
        [os.environ.get("UV", "uv"), "lock", "--check", "--offline", "--project", PROJECT],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr


def test_its_torch_is_that_of_torch_xla_and_not_the_workspaces() -> None:
    own, ours = locked(f"{PROJECT}/uv.lock"), locked("uv.lock")
    assert own["torch"].rpartition(".")[0] == own["torch-xla"].rpartition(".")[0] == "2.9"
    assert "torch-xla" not in ours
    assert not ours["torch"].startswith("2.9.")
