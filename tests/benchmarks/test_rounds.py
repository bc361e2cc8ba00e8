"""The benchmarks' common part: turns are fair, and the table shows medians, differences and ratios."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rounds() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_rounds", BENCHMARKS / "rounds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_each_round_begins_with_another_contestant_and_the_first_round_does_not_count(
    rounds: ModuleType,
) -> None:
    called: list[str] = []

    def contestant(name: str) -> float:
        called.append(name)
        return float(len(called))

    seconds = rounds.take_turns({"a": lambda: contestant("a"), "b": lambda: contestant("b")}, rounds=2)
    assert called == ["a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_table_compares_within_rounds(rounds: ModuleType) -> None:
    seconds = {"raw": [1e-6, 2e-6, 3e-6], "ours": [2e-6, 3e-6, 9e-6]}
    shown = str(rounds.Table(title="A step", unit="us", measured=seconds))
    assert shown.splitlines() == [
        "**A step**",
        "",
        "| | median, us | added, us | ratio |",
        "|---|---:|---:|---:|",
        "| raw | 2 | | |",
        "| ours | 3 | 1 | 2.00 |",
    ]
