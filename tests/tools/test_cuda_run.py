"""The command for a card, where there is none."""

import os
import subprocess
import sys
from importlib.metadata import distributions, entry_points
from pathlib import Path

import pytest

from cuda.source_path import requirements, source_path

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "cuda"
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
        (["tets"], 2, "'tets' is no part"),
        (["--minutes", "-1"], 2, "--minutes -1: more than 0 is allowed"),
        (["--out", __file__], 2, "no folder can be made there (File exists); name another one"),
    ],
)
@pytest.mark.slow
def test_without_a_card_nothing_is_run_and_that_is_said(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(ROOT / "tools" / "cuda" / "run.py"), "--out", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


SESSION = """
import time
import pytest

real = time.monotonic

@pytest.mark.cuda
def test_old(): pass

@pytest.mark.cuda
def test_new(): time.monotonic = lambda: real() + 3600  # it took an hour
"""


def run_session(folder: Path, *, minutes: float, missing: str = "", **files: str) -> tuple[int, str]:
    """Run the tests of some files as a card's are run; the exit code, and what was printed."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-c", str(TOOL / "pytest.ini"), "--rootdir", str(folder)]
    command += ["-v", "-rs", "-p", "card_session", "--card-out", str(folder), "-m", "cuda", "--card-missing"]
    command += [missing, "--card-minutes", str(minutes), str(folder)]
    path = os.pathsep.join(map(str, (TOOL, ROOT / "tests", *ROOT.glob("packages/*/src"))))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_what_has_never_passed_on_a_card_comes_first_and_what_is_not_begun_fails_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "passed.txt").write_text("test_each.py::test_old\n")
    code, said = run_session(tmp_path, minutes=5, test_each=SESSION)
    assert code == 9, said
    assert "1 tests were not begun" in said
    assert "test_each.py::test_new PASSED" in said
    assert (tmp_path / "passed.txt").read_text().split() == [
        "test_each.py::test_old",
        "test_each.py::test_new",
    ]


@pytest.mark.slow
def test_a_file_that_imports_what_is_known_to_be_missing_is_skipped_by_name(tmp_path: Path) -> None:
    wants = "import gone.part\ndef test_it(): pass\n"
    code, said = run_session(tmp_path, minutes=1, missing="gone", test_wants=wants)
    assert (code, "wants gone" in said) == (0, True), said
    code, said = run_session(tmp_path, minutes=1, missing="other", test_wants=wants)
    assert (code, "No module named 'gone'" in said) == (2, True), said


@pytest.mark.slow
def test_a_run_that_chooses_nothing_is_no_success(tmp_path: Path) -> None:
    code, said = run_session(tmp_path, minutes=1, test_each="def test_without_a_card(): pass\n")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED, said


@pytest.mark.slow
def test_every_test_that_only_a_card_can_show_is_run_on_one(tmp_path: Path) -> None:
    """As if there were a card: those that ask for no device are chosen as well."""
    pretend = "import torch\ntorch.cuda.is_available = lambda: True\n"
    (tmp_path / "pretend.py").write_text(pretend)
    path = os.pathsep.join(map(str, (tmp_path, TOOL, ROOT / "tests", *ROOT.glob("packages/*/src"))))
    command = [sys.executable, "-m", "pytest", "-c", str(TOOL / "pytest.ini"), "--rootdir", str(ROOT)]
    command += ["--confcutdir", str(ROOT / "tests" / "hardware"), "-p", "pretend", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, "-m", "cuda", "tests/hardware"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "test_launcher.py::test_the_doctor_finds_driver_and_library_in_order",
        "test_launcher.py::test_the_card_is_told_that_the_variable_shows[by uuid]",
        "test_accelerate.py::test_accelerate_unscales_gradients_of_fp16",
        "test_waits.py::test_a_step_runs_where_cuda_refuses_waits[cuda-single-no]",
    ):
        assert f"tests/hardware/{name}" in done.stdout
    assert "[simulated" not in done.stdout


@pytest.mark.slow
def test_without_what_the_packages_need_benchmarks_are_skipped_and_say_why(tmp_path: Path) -> None:
    """In a Python that finds torch, but neither numpy nor xxhash."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name in ('numpy', 'xxhash') else find(name, *rest)\n"
    )
    command = [sys.executable, str(TOOL / "run.py"), "benchmarks", "--dry", "--out", str(tmp_path / "out")]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "benchmarks: skipped: drivetrain wants numpy, xxhash" in done.stdout
