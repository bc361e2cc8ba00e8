"""Libraries that a test file needs where they are installed, imported no sooner than one of its tests wants them.

Every lane collects every file: what a file imports at its head, each lane imports, whoever runs the tests.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


def skip_without(name: str) -> None:
    """Skip the test, or the test file that calls this at its head, where a library is not installed."""
    if not is_installed(name.partition(".")[0]):  # a parent would be imported to look for its child
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def is_installed(name: str) -> bool:
    """Whether a library is installed; the folder of tests that has its name, `tests/deepspeed`, is none."""
    found = find_spec(name)
    return found is not None and found.origin is not None


def import_later(name: str) -> Any:
    """Return a stand-in that imports a library when a test reads one of its attributes; skip as `skip_without`."""
    skip_without(name)
    return _Later(name)


class _Later:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith(
            ("_", "pytest")
        ):  # what pytest asks of all objects of a file that it collects
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
