import pytest

from drivetrain_tracking.view.answers import CurveQuestion
from drivetrain_tracking.view.request import BadRequestError, read_curve_question, read_index, read_query


def test_a_question_for_curves_is_read() -> None:
    asked = read_query("metric=lr%2Fhead&run=0&run=3&axis=time&low=1.5&high=2&columns=800")
    assert read_curve_question(asked) == CurveQuestion(
        metric="lr/head", runs=[0, 3], axis="time", low=1.5, high=2.0, num_columns=800
    )


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("axis=step&columns=9", "metric is there 0 times"),
        ("metric=a&axis=depth&columns=9", "axis='depth': say one of step, time, relative"),
        ("metric=a&axis=step&columns=0", "say a number from 1 to"),
        ("metric=a&axis=step&columns=99999", "say a number from 1 to"),
        ("metric=a&axis=step&columns=-1", "say a number from 0 on"),
        ("metric=a&axis=step&columns=9&low=nan", "low='nan': say a finite number"),
        ("metric=a&axis=step&columns=9&low=2&high=1", "low must not be above high"),
        ("metric=a&axis=step&columns=9&run=x", "run='x': say a number"),
    ],
)
def test_a_bad_question_says_what_is_wrong(query: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        read_curve_question(read_query(query))


def test_numbers_are_digits_alone() -> None:
    for text in ("", "-1", "1.0", "²", "9999999999"):
        with pytest.raises(BadRequestError, match="run="):
            read_index({"run": [text]}, "run")


def test_a_query_of_thousands_of_parameters_is_refused() -> None:
    with pytest.raises(BadRequestError, match="cannot be read"):
        read_query("&".join(["a=1"] * 2000))
