import time
from io import StringIO

from drivetrain_doctor.report.step_display import StepDisplay


class Terminal(StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_changes_and_goes() -> None:
    stream = Terminal()
    progress = StepDisplay(stream)
    for step in ("limits", "limits", "port"):
        progress(step)
    progress.clear()
    assert stream.getvalue() == "\r\x1b[Kdoctor: limits ...\r\x1b[Kdoctor: port ...\r\x1b[K"


def test_elsewhere_each_step_is_a_line_and_waits_are_shown_now_and_then() -> None:
    stream = StringIO()
    progress = StepDisplay(stream)
    progress("limits")
    for missing in range(100):
        progress(f"waiting for host {missing}")
    progress.clear()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "drivetrain: doctor: limits"
    assert len(lines) <= 3


def test_the_first_wait_is_shown_however_soon_it_comes_and_a_new_one_once_it_may() -> None:
    stream = StringIO()
    progress = StepDisplay(stream, seconds_between_waits=0.05)
    progress("limits")
    for _ in range(3):
        progress("waiting for host 0")
    for _ in range(20):
        progress("waiting for host 1")
        time.sleep(0.01)
    assert stream.getvalue().splitlines() == [
        "drivetrain: doctor: limits",
        "drivetrain: doctor: waiting for host 0",
        "drivetrain: doctor: waiting for host 1",
    ]
