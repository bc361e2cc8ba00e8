"""Runs the ```python blocks of the documentation and of every README, page by page, in the page's order."""

import os
import tempfile
from pathlib import Path
from typing import Any

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

# Sketches of shapes and protocols, not code that a user copies.
SKETCHES = ("docs/design.md", "docs/platforms.md")


def enter_page(namespace: dict[str, Any]) -> None:
    """Give a page a working folder of its own and the module name that a user's script has."""
    folder = tempfile.TemporaryDirectory(prefix="page-")
    namespace.update({"__name__": "__main__", "_page": (Path.cwd(), folder)})
    os.chdir(folder.name)


def leave_page(namespace: dict[str, Any]) -> None:
    """Go back to where pytest started, and remove what the page wrote."""
    before, folder = namespace["_page"]
    os.chdir(before)
    folder.cleanup()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    pattern="*.md",
    excludes=SKETCHES,
    setup=enter_page,
    teardown=leave_page,
).pytest()
