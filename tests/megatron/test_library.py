"""Megatron-Core is named with the extra that brings it where it is missing; its import is silent."""

import subprocess

from processes import environment_alone

WITHOUT = """
import sys
sys.modules["megatron"] = None
from drivetrain_backends.errors import BackendNotInstalledError
try:
    import drivetrain_megatron.backend
except BackendNotInstalledError as error:
    print(error)
"""
QUIET = """
import warnings
warnings.simplefilter("error")
import drivetrain_megatron.library
print("imported")
"""


def run(python: str, source: str) -> str:
    done = subprocess.run(
        [python, "-c", source],
        env=environment_alone(), capture_output=True, text=True, timeout=150, check=True,
    )  # fmt: skip
    return done.stdout


def test_the_extra_is_named_where_the_library_is_missing(python: str) -> None:
    said = run(python, WITHOUT)
    assert said.startswith("backend='megatron': the module megatron")
    assert "pip install 'drivetrain[megatron]', or 'drivetrain-megatron[megatron]'" in said


def test_its_warnings_on_import_are_kept_to_itself(python: str) -> None:
    assert run(python, QUIET) == "imported\n"
