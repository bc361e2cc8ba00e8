import pytest

from drivetrain_messages import say


def test_a_line_is_marked_and_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("two nodes meet")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "drivetrain: two nodes meet\n")
