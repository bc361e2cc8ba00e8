"""What rank 0 draws stays whole between the lines of other ranks, judged by a terminal emulator."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drivetrain_launcher.run.output.screen import LINE_PATIENCE_SECONDS, Screen, Size, wrap
from optional_modules import import_later

# A terminal emulator, which is not there where the package is tried alone.
pyte = import_later("pyte")

COLUMNS, ROWS = 30, 8

# What programs write to draw, one refresh each: a line, a bar, two bars (tqdm), a display of three rows (rich).
TQDM = tuple(f"\r{step:3d}%|{'#' * (step // 10):<10}|".encode() for step in range(0, 101, 20))
NESTED = tuple(
    piece
    for outer in range(3)
    for piece in (
        f"\router {outer}/3".encode(),
        b"",
        *(b"\n\rinner " + str(inner).encode() + b"/4\x1b[A" for inner in range(4)),
    )
)
RICH_ROWS = b"top %d\nmiddle %d\nbottom %d"
RICH = (
    b"\x1b[?25l" + RICH_ROWS % (0, 0, 0),
    *(b"\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2K" + RICH_ROWS % (step, step, step) for step in range(1, 6)),
)


class Terminal:
    """A terminal with its history, and a screen that writes to it."""

    def __init__(self, rows: int = ROWS) -> None:
        self.emulator = pyte.HistoryScreen(COLUMNS, rows, history=10_000, ratio=0.5)
        self.emulator.set_mode(
            pyte.modes.LNM
        )  # a newline goes to the start of the row, as the kernel's terminal has it
        self._stream = pyte.ByteStream(self.emulator)
        self.written: list[bytes] = []
        self.screen = Screen(self._write, lambda: Size(COLUMNS, rows))

    def _write(self, data: bytes) -> None:
        self.written.append(data)
        self._stream.feed(data)

    def text(self) -> list[str]:
        """Every row, from the first that has left the screen, without empty ones at the end."""
        gone = ["".join(row[column].data for column in range(COLUMNS)) for row in self.emulator.history.top]
        rows = [row.rstrip() for row in (*gone, *self.emulator.display)]
        while rows and not rows[-1]:
            rows.pop()
        return rows


def play(leader: Sequence[bytes], others: Sequence[int], rows: int = ROWS) -> Terminal:
    """Write the refreshes of rank 0; before each, so many lines of another rank."""
    terminal, number = Terminal(rows), 0
    for refresh, count in zip(leader, (*others, *[0] * len(leader)), strict=False):
        for _ in range(count):
            terminal.screen.write_lines(b"[rank 1] line %d\n" % number, now=0.0)
            number += 1
        terminal.screen.write_leader(refresh, now=0.0)
    return terminal


COUNTS = st.lists(st.integers(0, 4), max_size=14)


@pytest.mark.parametrize(
    ("refreshes", "drawn"),
    [
        ([*TQDM, b"\n"], ["100%|##########|"]),
        (NESTED, ["outer 2/3", "inner 3/4"]),
        ([*RICH, b"\n\x1b[?25h"], ["top 5", "middle 5", "bottom 5"]),
    ],
    ids=["a bar", "two bars", "a display of three rows"],
)
@given(others=COUNTS)
def test_lines_stand_above_what_rank_0_draws(
    refreshes: Sequence[bytes], drawn: list[str], others: list[int]
) -> None:
    text = play(refreshes, others).text()
    number = sum(others[: len(refreshes)])
    assert text == [*(f"[rank 1] line {line}" for line in range(number)), *drawn]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), COUNTS)
def test_it_does_not_matter_where_the_reads_cut_the_bytes(cuts: list[int], others: list[int]) -> None:
    data, pieces = b"".join([*RICH, b"\n\x1b[?25h"]), []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    text = play([*pieces, data], [0, *others]).text()
    # In the midst of a refresh what is already erased is not above, and what is drawn later is whole.
    drawn = [row for row in text if not row.startswith("[rank")]
    assert drawn[-3:] == ["top 5", "middle 5", "bottom 5"]
    number = sum([0, *others][: len(pieces) + 1])
    assert [row for row in text if row.startswith("[rank")] == [
        f"[rank 1] line {line}" for line in range(number)
    ]


@given(COUNTS)
def test_a_prompt_that_wraps_is_not_cut(others: list[int]) -> None:
    prompt = b"a prompt that is longer than the terminal is wide: "
    text = play([prompt, b"", b"", b"yes\n"], others).text()
    start = text.index("a prompt that is longer than t")
    assert text[start : start + 2] == ["a prompt that is longer than t", "he terminal is wide: yes"]
    assert len(text) == sum(others[:4]) + 2


def test_a_bar_that_ended_leaves_the_next_lines_below_it() -> None:
    terminal = play([*TQDM, b"\n", b"saved\n"], [])
    terminal.screen.write_lines(b"[rank 1] after\n", now=0.0)
    assert terminal.text() == ["100%|##########|", "saved", "[rank 1] after"]


def test_lines_wait_below_a_bar_since_a_second_one_may_follow() -> None:
    terminal = play([*TQDM, b"\n"], [])
    terminal.screen.write_lines(b"[rank 1] meanwhile\n", now=0.0)
    terminal.screen.write_leader(b"\rinner 0/4\x1b[A", now=0.1)  # the read was cut before the second bar
    terminal.screen.write_leader(b"\router\x1b[K\n\rinner 1/4\n", now=0.2)
    assert terminal.text() == ["[rank 1] meanwhile", "outer", "inner 1/4"]


def test_long_lines_of_other_ranks_are_wrapped_above_the_bar_even_beyond_the_screen() -> None:
    terminal = Terminal()
    terminal.screen.write_leader(TQDM[0], now=0.0)
    line = "x" * (COLUMNS * ROWS * 2) + "end"
    terminal.screen.write_lines(line.encode() + b"\n", now=0.0)
    text = terminal.text()
    assert "".join(text[:-1]) == line
    assert text[-1] == "  0%|          |"


def test_nothing_is_written_into_a_sequence_that_a_read_has_cut() -> None:
    terminal = Terminal()
    terminal.screen.write_leader(b"bar \x1b[3", now=0.0)
    terminal.screen.write_lines(b"[rank 1] line\n", now=0.0)
    assert terminal.written == [b"bar \x1b[3"]
    terminal.screen.write_leader(b"1mred", now=0.0)
    assert terminal.text() == ["[rank 1] line", "bar red"]


def test_lines_wait_while_rank_0_has_the_second_page() -> None:
    terminal = Terminal()
    terminal.screen.write_leader(b"\x1b[?1049hfull screen", now=0.0)
    terminal.screen.write_lines(b"[rank 1] line\n", now=0.0)
    assert len(terminal.written) == 1
    assert terminal.screen.has_held
    terminal.screen.write_leader(b"\x1b[?1049l", now=9.0)
    assert b"[rank 1] line\n" in terminal.written[-1]


def test_in_a_pipe_lines_wait_for_rank_0_to_end_its_own_but_not_for_ever() -> None:
    written: list[bytes] = []
    screen = Screen(written.append, None)
    screen.write_leader(b"loading ... ", now=0.0)
    screen.write_lines(b"[rank 1] a\n", now=0.0)
    screen.write_leader(b"done\n", now=0.1)
    assert b"".join(written) == b"loading ... done\n[rank 1] a\n"
    screen.write_leader(b"\r10%", now=1.0)
    screen.write_lines(b"[rank 1] b\n", now=1.0)
    screen.release(now=1.0 + LINE_PATIENCE_SECONDS / 2)
    assert screen.has_held
    screen.release(now=1.0 + LINE_PATIENCE_SECONDS)
    assert b"".join(written).endswith(b"\r10%\n[rank 1] b\n")


ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])")


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=12)), max_size=20))
@example([(True, b"\x1b0"), (False, b"")])
def test_in_a_pipe_every_byte_of_every_rank_is_written_in_its_order(parts: list[tuple[bool, bytes]]) -> None:
    written: list[bytes] = []
    screen = Screen(written.append, None)
    mark, lines = b"\x00other:", []
    for leads, data in parts:
        if leads:
            screen.write_leader(data.replace(b"\x00", b""), now=0.0)
        else:
            lines.append(mark + data.replace(b"\n", b"").replace(b"\x00", b"") + b"\n")
            screen.write_lines(lines[-1], now=0.0)
    screen.end_leader_line()
    screen.release(now=0.0, at_once=True)
    output = b"".join(written)
    place = 0
    for line in lines:
        place = output.index(line, place)
        before = ESCAPE.sub(b"", output[:place])  # a sequence at the start of a line shows nothing
        assert before[-1:] in (b"", b"\n")  # never inside a line
        place += len(line)
    leader = b"".join(data.replace(b"\x00", b"") for leads, data in parts if leads)
    for line in lines:
        output = output.replace(line, b"", 1)
    assert output in (leader, leader + b"\n")


@pytest.mark.parametrize(
    "text", ["", "short", "x" * 100, "wide 漢字" * 9, "\x1b[31mred\x1b[0m" * 12, "a\tb" * 9]
)
def test_rows_are_as_wide_as_the_terminal_at_most(text: str) -> None:
    rows = [row.decode() for row in wrap(text.encode(), 20)]
    emulator = pyte.Screen(20, len(rows) + 2)
    pyte.Stream(emulator).feed("\r\n".join(rows))
    assert emulator.cursor.y == len(rows) - 1  # none has wrapped by itself
    assert "".join(rows) == text.expandtabs(8) or "\t" in text
