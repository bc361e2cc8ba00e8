import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MATRIX = """
@pytest.mark.default_cases(WORDS)
@pytest.mark.parametrize("num_processes", [1, 2, pytest.param(4, marks=pytest.mark.cuda)])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_NUMBER(backend, num_processes): ...
"""


def collected(folder: Path, words: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """What pytest collects of a matrix for each of the words."""
    tests = [MATRIX.replace("WORDS", each).replace("NUMBER", str(n)) for n, each in enumerate(words)]
    (folder / "test_matrix.py").write_text("import pytest\n" + "".join(tests))
    (folder / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {TESTS}\nmarkers =\n  slow:\n  cuda:\n  default_cases:\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "default_cases", "--collect-only", "-q", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_cases_without_a_word_are_slow_but_those_for_a_card(tmp_path: Path) -> None:
    default = {
        '"ddp-1"': ["ddp-1", "ddp-4", "fsdp-4"],
        '"ddp"': ["ddp-1", "ddp-2", "ddp-4", "fsdp-4"],
        '"fsdp-2", "1"': ["ddp-1", "ddp-4", "fsdp-1", "fsdp-2", "fsdp-4"],
        "": ["ddp-4", "fsdp-4"],
    }
    fast = collected(tmp_path, list(default), "-m", "not slow").stdout
    assert [line for line in fast.splitlines() if "::" in line] == [
        f"test_matrix.py::test_{number}[{case}]"
        for number, cases in enumerate(default.values())
        for case in cases
    ]


def test_a_word_of_no_case_is_refused(tmp_path: Path) -> None:
    run = collected(tmp_path, ['"ddp", "sdp"'])
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        "test_matrix.py::test_0: default_cases names ['sdp'], which fits no case" in run.stderr + run.stdout
    )
    assert collected(tmp_path, ['"ddp", "sdp"'], "test_matrix.py::test_0[ddp-1]").returncode == 0
