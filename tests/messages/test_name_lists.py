import pytest

from drivetrain_messages import format_count, list_some


@pytest.mark.parametrize(
    ("items", "most", "shown"),
    [
        ([], 2, ""),
        (["a"], 2, "a"),
        (["a", "b"], 2, "a, b"),
        (["a", "b", "c"], 2, "a, b and 1 more"),
        (range(10), 3, "0, 1, 2 and 7 more"),
    ],
)
def test_the_first_items_are_shown_with_the_number_of_others(
    items: list[object], most: int, shown: str
) -> None:
    assert list_some(items, most=most) == shown


@pytest.mark.parametrize(
    ("number", "noun", "shown"),
    [(0, "file", "0 files"), (1, "file", "1 file"), (2, "process", "2 processes")],
)
def test_a_count_has_its_noun(number: int, noun: str, shown: str) -> None:
    assert format_count(number, noun) == shown
