"""Importing a package does nothing: no third party is loaded, no environment read, no handler or filter set."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checks.workspace import read_packages

MODULES = [package.module for package in read_packages(Path(__file__).resolve().parents[1]).values()]

PROBE = """
import json, logging, os, sys, threading, warnings

class Watched(dict):
    reads = []

    def _note(self, key):
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("drivetrain"):
                self.reads.append(str(key))
            frame = frame.f_back

    def __getitem__(self, key):
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self._note(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self._note(key)
        return super().get(key, default)

before = set(sys.modules)
filters, handlers = list(warnings.filters), list(logging.getLogger().handlers)
os.environ = Watched(os.environ)
__import__(sys.argv[1])
print(json.dumps({
    "loaded": sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names),
    "environment": Watched.reads,
    "threads": threading.active_count() - 1,
    "changed": warnings.filters != filters or logging.getLogger().handlers != handlers,
}))
"""


@pytest.mark.parametrize("module", MODULES)
def test_importing_a_package_does_nothing(module: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROBE, module],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    found = json.loads(finished.stdout)
    loaded = set(found.pop("loaded"))
    assert loaded - {"drivetrain_messages"} == {module} - {
        "drivetrain_messages"
    }  # which gives names on demand
    assert found == {
        "environment": [],
        "threads": 0,
        "changed": False,
    }
