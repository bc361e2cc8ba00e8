"""Prefixes, and colours that can be read by day and by night."""

from itertools import pairwise

import pytest

from drivetrain_launcher.run.output.terminals import COLOURS, coloured_outputs, prefix_of


def luminance(colour: int) -> float:
    """Return the relative luminance of one of the 256 colours, as WCAG defines it."""
    levels = (0, 95, 135, 175, 215, 255)
    index = colour - 16
    parts = [levels[index // 36] / 255, levels[index // 6 % 6] / 255, levels[index % 6] / 255]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", COLOURS)
def test_a_colour_stands_out_from_black_and_from_white(colour: int) -> None:
    light = luminance(colour)
    assert 1.05 / (light + 0.05) >= 3.9
    assert (light + 0.05) / 0.05 >= 3.9


def test_neighbours_differ_and_the_host_is_named_where_there_are_several() -> None:
    assert prefix_of(3) == "[rank 3] "
    assert prefix_of(12, host="node1") == "[rank 12 node1] "
    coloured = [prefix_of(rank, is_coloured=True) for rank in range(2 * len(COLOURS))]
    assert all(text.endswith("]\x1b[0m ") for text in coloured)
    used = [text.partition("m")[0] for text in coloured]
    assert all(first != second for first, second in pairwise(used))


@pytest.mark.parametrize(
    ("is_terminal", "variables", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),  # empty counts as unset
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"FORCE_COLOR": "0"}, False),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_no_color_and_force_color_are_respected(
    is_terminal: bool, variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.isatty", lambda file: is_terminal)
    assert coloured_outputs({"TERM": "xterm", **variables}) == (expected, expected)
