import pytest

from drivetrain_messages import say
from drivetrain_messages.console import said_colours


def test_a_line_is_marked_and_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("two nodes meet")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "drivetrain: two nodes meet\n")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, None),
        ({"NO_COLOR": "", "FORCE_COLOR": ""}, None),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"FORCE_COLOR": "0"}, False),
        ({"FORCE_COLOR": "1"}, True),
    ],
)
def test_no_color_decides_then_force_color(variables: dict[str, str], said: bool | None) -> None:
    assert said_colours(variables) is said
