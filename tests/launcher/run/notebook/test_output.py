import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher.run.notebook.output import OutputView, StreamView


def screen(text: str) -> list[str]:
    """The lines that a terminal shows after this text: a carriage return goes to the line's beginning."""
    lines = []
    for line in text.split("\n"):
        cells = ""
        for part in line.split("\r"):
            cells = part + cells[len(part) :]
        lines.append(cells.rstrip())
    return lines


def shown(writes: Sequence[tuple[int, bytes]], *, num_ranks: int = 2, refresh: bool = True) -> list[str]:
    texts: list[str] = []
    view = StreamView(texts.append, num_ranks=num_ranks)
    for rank, data in writes:
        view.feed(rank, data)
        if refresh:
            view.draw()
    view.finish()
    return screen("".join(texts))[:-1]


GROESSE = "größe\n".encode()


@pytest.mark.parametrize(
    ("writes", "num_ranks", "expected"),
    [
        (
            [(0, b"a\nb"), (1, b"c"), (0, b"d\n"), (1, b"e\n")],
            2,
            ["[rank 0] a", "[rank 0] bd", "[rank 1] ce"],
        ),
        ([(0, b"epoch 1\n\nepoch 2\n")], 1, ["epoch 1", "", "epoch 2"]),
        ([(1, GROESSE[:3]), (1, GROESSE[3:]), (0, b"\xff\n")], 2, ["[rank 1] größe", "[rank 0] \ufffd"]),
        ([(1, b"\r50%|##"), (1, b"\r       \r")], 2, []),
        ([(0, b"a"), (1, b"b")], 2, ["[rank 0] a", "[rank 1] b"]),
    ],
    ids=["whole lines", "one rank has no prefix", "cut and wrong characters", "wiped bar", "no last newline"],
)
def test_lines_of_ranks_are_shown_whole_with_the_rank_in_front(
    writes: list[tuple[int, bytes]], num_ranks: int, expected: list[str]
) -> None:
    assert shown(writes, num_ranks=num_ranks) == expected


def test_a_bar_of_rank_0_stays_below_what_others_say_and_ends_with_its_last_state() -> None:
    texts: list[str] = []
    view = StreamView(texts.append, num_ranks=2)
    view.feed(0, b"\r 10%|#")
    view.draw()
    view.feed(1, b"hello\n")
    assert screen("".join(texts)) == ["[rank 1] hello", "[rank 0]  10%|#"]
    view.feed(0, b"\r100%|##########\n")
    assert screen("".join(texts)) == ["[rank 1] hello", "[rank 0] 100%|##########", ""]


@given(st.lists(st.tuples(st.integers(0, 2), st.text("ab\n", max_size=6)), max_size=12), st.booleans())
def test_no_line_is_lost_torn_or_reordered_within_a_rank(
    writes: list[tuple[int, str]], refresh: bool
) -> None:
    lines = shown([(rank, text.encode()) for rank, text in writes], num_ranks=3, refresh=refresh)
    for rank in range(3):
        said = "".join(text for writer, text in writes if writer == rank)
        expected = said.removesuffix("\n").split("\n") if said else []
        own = [
            line.removeprefix(f"[rank {rank}]").strip() for line in lines if line.startswith(f"[rank {rank}]")
        ]
        assert own == expected


class Terminal(io.StringIO):
    """A terminal, as the only screen of two streams."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_on_a_terminal_a_line_on_one_stream_does_not_tear_a_bar_on_the_other(stream: str) -> None:
    terminal = Terminal()
    other = "stdout" if stream == "stderr" else "stderr"
    view = OutputView(terminal, terminal, num_ranks=2)
    view.feed(other, 0, b"\r50%|#####")
    view.refresh()
    view.feed(stream, 1, b"hello\n")
    view.refresh()
    view.finish()
    assert screen(terminal.getvalue()) == ["[rank 1] hello", "[rank 0] 50%|#####", ""]
