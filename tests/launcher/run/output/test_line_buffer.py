"""Streams are cut into whole lines, marked and tamed, and nothing of them is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher.run.output.line_buffer import (
    MAX_LINE_BYTES,
    LineBuffer,
    for_terminal,
    mark,
    whole_characters,
)

PIECES = st.lists(
    st.binary(max_size=20) | st.sampled_from([b"\n", b"a\n", b"\xff\n", "é".encode()[:1]]), max_size=30
)


@given(PIECES)
def test_nothing_is_lost_and_the_order_is_kept(pieces: list[bytes]) -> None:
    buffer = LineBuffer()
    handed = [buffer.feed(piece) for piece in pieces]
    assert all(lines.endswith(b"\n") for lines in handed if lines)
    whole, rest = b"".join(handed), buffer.flush()
    given_bytes = b"".join(pieces)
    assert whole + rest == given_bytes + (b"" if not rest else b"\n")
    assert buffer.flush() == b""


@given(PIECES)
def test_each_line_is_marked_once(pieces: list[bytes]) -> None:
    text = b"".join(pieces) + b"\n"
    marked = mark(text, b"[1] ")
    lines = marked.split(b"\n")[:-1]
    assert all(line.startswith(b"[1] ") for line in lines)
    assert [line.removeprefix(b"[1] ") for line in lines] == text.split(b"\n")[:-1]


def test_a_line_without_end_is_handed_on_in_pieces_that_cut_no_character() -> None:
    buffer, text = LineBuffer(), "ü".encode()
    data = b"x" + text * (MAX_LINE_BYTES // 2 + 10)
    handed = b"".join(buffer.feed(data[start : start + 4097]) for start in range(0, len(data), 4097))
    pieces = [*handed.split(b"\n")[:-1], buffer.flush()[:-1]]
    assert b"".join(pieces) == data
    assert [piece.decode() for piece in pieces]  # each is whole UTF-8


def test_the_length_of_whole_characters() -> None:
    text = "aé€😀".encode()
    lengths = [whole_characters(text[:end]) for end in range(len(text) + 1)]
    assert lengths == [0, *[1] * 2, *[3] * 3, *[6] * 4, 10]
    assert whole_characters(b"\x80\x80\x80\x80\x80") == 5  # no UTF-8 at all is not waited for


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (b"plain\n\xff\xfe bytes\n", b"plain\n\xff\xfe bytes\n"),
        (b"\x1b[31mred\n", b"\x1b[31mred\x1b[0m\n"),
        (b"\x1b[2A\x1b[2Kup\x1b]0;title\x07\x07\x08 \x0eshift\x1bM\x1b[?1049h\n", b"up shift\n"),
        (b"\r 10%|#\r 50%|##\r100%|###\n", b"100%|###\n"),
        (b"windows\r\nend\n", b"windows\nend\n"),
    ],
    ids=["plain", "a colour ends with its line", "moves are left out", "last state of a bar", "windows"],
)
def test_lines_are_tamed_for_a_shared_terminal(lines: bytes, shown: bytes) -> None:
    assert for_terminal(lines) == shown


@given(st.binary(max_size=60))
def test_no_byte_that_moves_a_cursor_reaches_the_terminal(data: bytes) -> None:
    shown = for_terminal(data.replace(b"\n", b"") + b"\n")
    assert shown.count(b"\n") == 1
    rest = shown[:-1].replace(b"\x1b[0m", b"")
    controls = set(range(32)) - {9, 27}
    assert not controls & {*rest}
