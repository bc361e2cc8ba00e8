import os
import pty
import subprocess
import sys

import pytest

from drivetrain_config import environ
from drivetrain_launcher.cli.help_page import Page

HELP = "from drivetrain_launcher.cli.main import main; main(['--help'])"


def on_terminal(**variables: str | None) -> str:
    """What `drivetrain --help` writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = environ.child_environment(
        **{"TERM": "xterm", "NO_COLOR": None, "FORCE_COLOR": None, **variables}
    )
    with subprocess.Popen([sys.executable, "-c", HELP], stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the other end is closed
            pass
        assert process.wait(60) == 0
    os.close(ours)
    return shown.decode()


def test_a_terminal_shows_colours_unless_no_color_is_set() -> None:
    assert "\033[1mRun\033[0m" in on_terminal()
    assert "\033[38;5;31mlaunch\033[0m" in on_terminal()
    assert "\033" not in on_terminal(NO_COLOR="1")
    assert "\033" not in on_terminal(TERM="dumb")


def test_a_pipe_gets_no_colours() -> None:
    environment = environ.child_environment(TERM="xterm", NO_COLOR=None, FORCE_COLOR=None)
    command = [sys.executable, "-c", HELP]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert "\033" not in done.stdout


@pytest.mark.parametrize(("columns", "width"), [("100", 100), ("20", 60), ("400", 110), ("many", None)])
def test_the_width_is_that_of_the_terminal_within_limits(columns: str, width: int | None) -> None:
    with environ.exported(COLUMNS=columns):
        found = Page.of_terminal().width
    assert 60 <= found <= 110
    assert width in (None, found)


def test_rows_are_aligned_and_wrapped_and_words_are_not_cut_at_hyphens() -> None:
    page = Page(width=40, is_coloured=True)
    shown = page.rows([("a", "all-of-it is one, and-more than that"), ("--long-name", "x")], column=10)
    assert shown.replace("\033[38;5;31m", "").replace("\033[0m", "") == (
        "  a       all-of-it is one, and-more\n          than that\n  --long-name\n          x"
    )
    assert page.heading("Run") == "\033[1mRun\033[0m"
