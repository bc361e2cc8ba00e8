"""The plugin of a test run on a card: its order, its end, and what has passed.

Tests that have never passed on a card come first. `passed_on_card.txt` beside this file names those that have; a run
adds its own to `passed.txt` in its folder, to be added there. Tests that were not begun in the run's minutes make it
fail, so that it is run again. A file that imports a missing library is skipped by its name.
"""

import re
import time
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any

import pytest

PASSED = Path(__file__).with_name("passed_on_card.txt")
NOT_BEGUN = 9  # the exit code that run.py knows


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the folder of a run, its minutes, and what is missing."""
    parser.addoption("--card-out", type=Path, required=True, help="folder of logs and lists")
    parser.addoption("--card-minutes", type=float, required=True, help="after which no further test begins")
    parser.addoption("--card-missing", default="", help="libraries that are not installed, with commas")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the run's order, end and list."""
    out: Any = config.getoption("--card-out")
    minutes: Any = config.getoption("--card-minutes")
    missing: Any = config.getoption("--card-missing")
    config.pluginmanager.register(_CardSession(out, minutes=minutes, missing=missing.split(",")))


class _CardSession:
    """A run's order, end and list.

    Args:
        out: The folder.
        minutes: After these no further test begins.
        missing: The libraries that are known not to be installed.
    """

    def __init__(self, out: Path, *, minutes: float, missing: Collection[str]) -> None:
        self._list = out / "passed.txt"
        self._minutes = minutes
        self._missing = missing
        self._end = time.monotonic() + 60 * minutes
        self._num_not_begun = 0
        self._has_skipped_files = False

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Skip a file that imports what is known to be missing."""
        report = yield
        absent = re.search(r"ModuleNotFoundError: No module named '([^'.]+)", str(report.longrepr))
        if report.failed and absent and absent[1] in self._missing:
            self._has_skipped_files = True
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: wants {absent[1]}")
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put first what has never passed on a card; the tests of a file stay together, as they share processes."""
        lists = [path.read_text().split("\n") for path in (PASSED, self._list) if path.exists()]
        passed = {name for names in lists for name in names}
        files = {item.path for item in items if item.nodeid not in passed}
        items.sort(key=lambda item: (item.path not in files, item.nodeid in passed))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Begin no test after the end."""
        if time.monotonic() > self._end:
            self._num_not_begun += 1
            raise pytest.skip.Exception(f"{self._minutes:g} minutes are over")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what has passed, at once."""
        if report.when == "call" and report.passed:
            with self._list.open("a") as file:
                file.write(f"{report.nodeid}\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Say what was not begun, which is no success; files that all want a missing library are no failure."""
        if self._num_not_begun:
            print(f"\n{self._num_not_begun} tests were not begun")
            session.exitstatus = session.exitstatus or NOT_BEGUN
        elif session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._has_skipped_files:
            session.exitstatus = pytest.ExitCode.OK
