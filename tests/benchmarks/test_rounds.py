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


def test_a_goal_is_told_below_its_table_whether_it_is_met_or_not(rounds: ModuleType) -> None:
    measured = {"raw": [1e-6, 2e-6, 4e-6], "ours": [2e-6, 3e-6, 5e-6]}
    goals = [
        rounds.Goal(of="ours", beside="raw", most=2e-6, added=True),
        rounds.Goal(of="ours", beside="raw", most=1.01),
        rounds.Goal(of="ours", beside="theirs", most=1.0),
    ]
    shown = str(rounds.Table(title="A step", unit="us", measured=measured, goals=goals))
    assert shown.splitlines()[-4:] == [
        "",
        "- Goal: ours: at most 2 us more than raw: 1, met",
        "- Goal: ours: at most 1.01 x raw: 1.5, **missed**",
        "- Goal: ours: at most 1 x theirs: not measured",
    ]


def test_what_is_done_in_the_time_is_shown_as_a_rate(rounds: ModuleType) -> None:
    measured = {"raw": [0.5], "ours": [0.25]}
    table = rounds.Table(title="A step", unit="ms", measured=measured, rates={"tokens/s": 1000.0}, digits=3)
    assert str(table).splitlines()[2:] == [
        "| | median, ms | added, ms | ratio | tokens/s |",
        "|---|---:|---:|---:|---:|",
        "| raw | 500 | | | 2,000 |",
        "| ours | 250 | -250 | 0.500 | 4,000 |",
    ]


def test_rounds_end_when_their_time_is_over_and_each_is_told(rounds: ModuleType) -> None:
    told: list[int] = []

    def on_round(measured: dict[str, list[float]]) -> None:
        told.append(len(measured["a"]))

    seconds = rounds.take_turns({"a": lambda: 1.0}, rounds=9, within_seconds=0.0, on_round=on_round)
    assert seconds == {"a": [1.0]}
    assert told == [1]
