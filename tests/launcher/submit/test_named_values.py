import pytest

from drivetrain_launcher import LaunchError
from drivetrain_launcher.submit.named_values import read_options, read_variables

HERE = {"TOKEN": "secret", "EMPTY": ""}.get


def test_options_keep_everything_behind_the_first_equals_sign() -> None:
    assert read_options(["a=b=c,d", "e="]) == {"a": "b=c,d", "e": ""}


@pytest.mark.parametrize("pair", ["partition", "=gpu", ""])
def test_an_option_without_a_value_is_refused(pair: str) -> None:
    with pytest.raises(LaunchError, match=f"--option {pair}: say NAME=VALUE"):
        read_options([pair])


def test_an_option_or_variable_with_two_values_is_a_contradiction() -> None:
    assert read_options(["a=1", "a=1"]) == {"a": "1"}
    with pytest.raises(LaunchError, match="--option a=2: contradicts --option a=1; keep one"):
        read_options(["a=1", "a=2"])
    with pytest.raises(LaunchError, match="--env A=2: contradicts --env A=1; keep one"):
        read_variables(["A=1", "A=2"], HERE)


def test_variables_are_given_or_taken_from_here() -> None:
    assert read_variables(["A=x y", "TOKEN", "EMPTY"], HERE) == {"A": "x y", "TOKEN": "secret", "EMPTY": ""}


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("NOT_HERE", "it is not set here; say --env NOT_HERE=VALUE"),
        ("A-B=1", "'A-B' is no name of a variable"),
        ("=1", "'' is no name of a variable"),
        ("A\n=1", "is no name of a variable"),
        ("RANK=1", "--env RANK: the launcher sets it for each process"),
        ("DRIVETRAIN_CONFIG={}", "the launcher sets it"),
    ],
)
def test_a_wrong_variable_is_refused(pair: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_variables([pair], HERE)
