"""The order of the slow tests, which the commit draws, and their end, when their time is over.

A slow test may take longer than a fast one: it trains on several ranks or compiles something, beside others that do.
"""

import random
import time

import pytest

from checks.commits import commit

SLOW_MINUTES = 5.0
SECONDS_EACH = 600  # that a slow test may take, unless it says so itself


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add how long slow tests are begun."""
    parser.addoption(
        "--slow-minutes",
        type=float,
        default=SLOW_MINUTES,
        help="minutes after which no further slow test is begun (inf for all); the commit draws their order",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give the slow tests their order and end, if they are what is run."""
    if config.option.markexpr == "slow":
        config.pluginmanager.register(_Draw(config.getoption("--slow-minutes")))


class _Draw:
    """The order of a run of the slow tests, and its end.

    Args:
        minutes: After these no further test begins.
    """

    def __init__(self, minutes: float) -> None:
        self._minutes = minutes
        self._begin = time.monotonic()

    def pytest_report_header(self) -> str:
        return (
            f"slow tests: in the order that commit {commit()} draws, begun within {self._minutes:g} minutes"
        )

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order the files, whose tests share what they set up, and the tests of each; give each test its time."""
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SECONDS_EACH))
        order = {name: random.Random(commit() + name).random() for name in {item.nodeid for item in items}}
        files = {name: random.Random(commit() + name).random() for name in map(_file_of, items)}
        items.sort(key=lambda item: (files[_file_of(item)], order[item.nodeid]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() - self._begin > 60 * self._minutes:
            reason = f"{self._minutes:g} minutes are over; another commit begins with other slow tests"
            raise pytest.skip.Exception(reason)  # from here, so that -rs counts them in one line


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
