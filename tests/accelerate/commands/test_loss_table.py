import math

from drivetrain_accelerate.commands.comparison.loss_table import LossRow, rows_of, table_of


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
