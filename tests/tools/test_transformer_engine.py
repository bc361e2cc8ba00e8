import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from check import choose
from checks.transformer_engine import PROJECT, TESTS, build_variables, why_not_here

ROOT = Path(__file__).resolve().parents[2]


def read(file: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / file).read_text())


def locked(file: str) -> dict[str, str]:
    return {package["name"]: package.get("version", "") for package in read(file)["package"]}


@pytest.mark.parametrize(
    ("system", "machine", "message"),
    [
        ("darwin", "arm64", "there is no Transformer Engine for darwin"),
        (
            "linux",
            "riscv64",
            "there is no Transformer Engine for riscv64 processors, only for x86_64 and aarch64",
        ),
    ],
)
def test_other_machines_are_skipped_with_the_reason(system: str, machine: str, message: str) -> None:
    assert why_not_here(system, machine, ROOT) == message


def test_a_machine_without_a_compiler_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = why_not_here("linux", "x86_64", ROOT)
    assert reason == "it is compiled, and there is no C++ compiler 'no-such-compiler': apt-get install g++"


def test_the_compilation_finds_the_projects_own_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    variables = build_variables(ROOT / PROJECT)
    assert variables["PATH"].startswith(str(ROOT / PROJECT / ".venv" / "bin"))
    assert variables["UV_PROJECT_ENVIRONMENT"] == str(ROOT / PROJECT / ".venv")
    assert variables["MAX_JOBS"] == "3"


def test_it_is_asked_for_by_name_alone() -> None:
    assert [check.name for check in choose(["te"], known_packages=())] == ["te"]
    assert "te" not in [check.name for check in choose([], known_packages=())]
    assert any((ROOT / TESTS).glob("test_*.py"))


def test_its_lock_is_up_to_date_with_the_packages() -> None:
    """Else: uv lock --project envs/te."""
    finished = subprocess.run(
        [os.environ.get("UV", "uv"), "lock", "--check", "--offline", "--project", PROJECT],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr


def test_a_wheel_that_was_compiled_for_another_torch_is_not_taken_from_the_cache() -> None:
    variables = read(f"{PROJECT}/pyproject.toml")["tool"]["uv"]["extra-build-variables"]
    assert variables["transformer-engine-torch"]["DRIVETRAIN_TORCH"] == locked(f"{PROJECT}/uv.lock")["torch"]


def test_both_projects_know_the_same_release() -> None:
    ours, theirs = read("pyproject.toml"), read(f"{PROJECT}/pyproject.toml")
    assert ours["tool"]["uv"]["dependency-metadata"] == theirs["tool"]["uv"]["dependency-metadata"]
    assert locked("uv.lock")["transformer-engine"] == locked(f"{PROJECT}/uv.lock")["transformer-engine"]
