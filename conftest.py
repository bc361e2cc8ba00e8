"""Runs the ```python blocks of the documentation and of every README, page by page, in the page's order.

A ```text block right behind one is what it prints, and is compared; `...` stands for anything. A block below the line
`<!-- a process of its own -->` runs in a fresh interpreter, without what the page has defined: for code that looks at
all objects of its process, which pytest's would slow down a hundredfold.
"""

import doctest
import io
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.integration.pytest import SybilItem
from sybil.parsers.myst import CodeBlockParser, SkipParser

# A build that is killed leaves a lock that nobody opens again: each checkout has its own operators of DeepSpeed, for
# its tests and for the pages of its docs.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parent / "build" / "torch_extensions"))

pytest_plugins = ["lanes", "default_cases", "drawing", "rank_fixtures", "launch_fixtures"]

# Sketches of shapes and protocols, not code that a user copies.
SKETCHES = ("docs/design.md", "docs/design/platforms.md")
OWN_PROCESS = "<!-- a process of its own -->"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add how long the drill of faults goes on, and how much of the sweep is tried."""
    parser.addoption("--fault-rounds", type=int, default=8, help="rounds of each fault, in the slow tests")
    parser.addoption(
        "--sweep",
        choices=("sample", "all"),
        default="sample",
        help="what tests/sweep trains and tests/dispatch_sweep dispatches: drawn by the commit, or all",
    )


def enter_page(namespace: dict[str, Any]) -> None:
    """Give a page a working folder of its own and the module name that a user's script has."""
    folder = tempfile.TemporaryDirectory(prefix="page-")
    namespace.update({"__name__": "__main__", "_page": (Path.cwd(), folder, dict(os.environ))})
    os.chdir(folder.name)


def leave_page(namespace: dict[str, Any]) -> None:
    """Go back to where pytest started, and end and remove what the page leaves, variables of its libraries too."""
    before, folder, variables = namespace["_page"]
    if (dist := sys.modules.get("torch.distributed")) is not None and dist.is_initialized():
        dist.destroy_process_group()  # later tests of this lane begin without one
    os.chdir(before)
    os.environ.clear()
    os.environ.update(variables)
    folder.cleanup()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let a block's failure be shown wherever it arose."""
    # sybil 10.1 looks for its own frames in every traceback. That of a resource the block leaked has none, and the
    # IndexError of the search would end the whole session. Can go once sybil shows such a failure by itself.
    if isinstance(item, SybilItem):
        item._traceback_filter = MethodType(pytest.Item._traceback_filter, item)


class Printed:
    """What the last block printed, to be compared with the block behind it."""

    def __init__(self) -> None:
        self._run = PythonEvaluator()

    def run(self, example: Example) -> None:
        """Run a block of Python."""
        if example.document.text[: example.region.start].rstrip().endswith(OWN_PROCESS):
            printed = _run_alone(str(example.parsed))
        else:
            text = io.StringIO()
            with redirect_stdout(text):
                self._run(example)
            printed = text.getvalue()
        example.namespace["_printed"] = (example.region.end, printed)

    def compare(self, example: Example) -> str | None:
        """Compare a block of text, if nothing but a line's end is between it and the block before."""
        end, printed = example.namespace.get("_printed", (0, ""))
        between = example.document.text[end : example.region.start]
        if between.strip() or not end:
            return None
        checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        wanted = doctest.Example("", str(example.parsed))
        if checker.check_output(wanted.want, printed, flags):
            return None
        return f"the block before prints something else. {checker.output_difference(wanted, printed, flags)}"


def _run_alone(code: str) -> str:
    """Run a block as a script; return what it prints."""
    script = Path("train.py")
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


_printed = Printed()
pytest_collect_file = Sybil(
    parsers=[
        CodeBlockParser(language="python", evaluator=_printed.run),
        CodeBlockParser(language="text", evaluator=_printed.compare),
        SkipParser(),  # for a library that a package does not bring, where the package is tried alone
    ],
    pattern="*.md",
    excludes=SKETCHES,
    setup=enter_page,
    teardown=leave_page,
).pytest()
