import pytest

from drivetrain_messages import format_table


def test_columns_are_as_wide_as_their_widest_cell_and_aligned_as_said() -> None:
    rows = [("name", "size", "note"), ("embedding", "1.5 GB", ""), ("a", "20.0 GB", "tied")]
    assert format_table(rows, right=[1], indent="> ").splitlines() == [
        "> name          size  note",
        "> embedding   1.5 GB",
        "> a          20.0 GB  tied",
    ]


def test_a_table_without_rows_is_empty() -> None:
    assert format_table([]) == ""


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        format_table([("a", "b"), ("c",)])
