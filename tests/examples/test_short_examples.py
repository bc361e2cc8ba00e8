"""The examples that print a result: it is the right one, and the same on one process and on two."""

import re
from collections.abc import Callable

import pytest

from example_launching import launch

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("num_processes", [1, 2])]


def number(pattern: str, text: str) -> float:
    """The number that the pattern's group found."""
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


def test_minimal_fits_the_line(python: str, num_processes: int) -> None:
    shown = launch("minimal.py", python=python, num_processes=num_processes).stdout
    assert number(r"loss ([\d.]+) on", shown) < 0.01
    assert f"on {num_processes} process(es)" in shown


def test_token_counts_shows_the_error_that_count_removes(run_example: Callable, num_processes: int) -> None:
    shown = run_example("token_counts.py", num_processes=num_processes).stdout
    assert number(r"backward\(mean\): the gradient is ([\d.]+) % off", shown) > 10
    assert number(r"backward\(sum, count=n\): the gradient is ([\d.]+) % off", shown) == 0


@pytest.mark.slow
def test_evaluation_is_exact_on_an_uneven_tail(run_example: Callable, num_processes: int) -> None:
    shown = run_example("evaluation.py", num_processes=num_processes).stdout
    assert "103 points, accuracy 0.291262\n73 were wrong, the first: point 0, point 1, point 2\n" in shown
