"""A script's losses under the real Accelerate and under the interface, side by side."""

import math
from pathlib import Path

import pytest

from drivetrain_accelerate.commands.side_by_side import ComparisonArguments, LossRow, rows_of, run, table_of

pytest.importorskip("accelerate", reason="the real one runs, too")

PROGRAM = str(Path(__file__).parents[1] / "programs" / "small_training.py")


@pytest.mark.slow
def test_losses_that_are_the_same_end_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ComparisonArguments(script=PROGRAM, steps=4)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "real", "ours", "difference"]
    assert [line.split()[0] for line in lines[1:5]] == ["1", "2", "3", "4"]
    assert lines[5] == "all 4 losses are the same (tolerance 0.0001)"


@pytest.mark.slow
def test_losses_that_differ_end_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ComparisonArguments(script=PROGRAM, steps=2, arguments=("--skew",))) == 1
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines()[1:3]] == ["differs"] * 2
    assert "2 of 2 losses differ" in out


@pytest.mark.slow
def test_a_script_that_fails_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ComparisonArguments(script=PROGRAM, arguments=("--fail",))) == 1
    error = capsys.readouterr().err
    assert "the real Accelerate: ended with exit code 1" in error
    assert "ValueError: this program fails" in error


@pytest.mark.slow
def test_a_script_without_backward_has_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "empty.py"
    script.write_text("print('nothing')")
    assert run(ComparisonArguments(script=str(script))) == 1
    assert "neither run called accelerator.backward" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_are_compared_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ComparisonArguments(script=PROGRAM, steps=3, num_processes=2)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "step", "real", "ours", "difference"]
    pairs = [(line.split()[0], line.split()[1]) for line in lines[1:7]]
    assert sorted(pairs) == [(rank, step) for rank in "01" for step in "123"]


def test_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match="--steps 0: must be at least 1"):
        ComparisonArguments(script="x", steps=0)


def row(real: float | None, ours: float | None) -> LossRow:
    return LossRow(rank=0, step=1, real=real, ours=ours)


def test_a_step_that_one_run_lacks_differs() -> None:
    rows = rows_of([[1.0, 2.0]], [[1.0]])
    assert [each.is_same(1e-4) for each in rows] == [True, False]
    assert table_of(rows, 1e-4).splitlines()[2].split() == ["2", "2", "none", "differs"]


def test_the_tolerance_is_relative_and_nan_is_nan() -> None:
    assert row(100.0, 100.005).is_same(1e-4)
    assert not row(100.0, 100.05).is_same(1e-4)
    assert row(math.nan, math.nan).is_same(1e-4)
    assert not row(math.nan, 1.0).is_same(1e-4)


def test_ranks_have_a_column_where_there_are_several() -> None:
    table = table_of(rows_of([[1.0], [2.0]], [[1.0], [2.5]]), 1e-4).splitlines()
    assert table[0].split()[0] == "rank"
    assert table[2].split() == ["1", "1", "2", "2.5", "+5.00e-01", "differs"]
