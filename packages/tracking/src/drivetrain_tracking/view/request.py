"""Parse the URL of a page's request. Pure."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Literal, TypeAlias, cast, get_args
from urllib.parse import parse_qs

from drivetrain_tracking.view.answers import CurveQuestion, ShownAxis

_MOST_COLUMNS = 8192

Asked: TypeAlias = Mapping[str, Sequence[str]]


class BadRequestError(ValueError):
    """A URL asks for something that does not exist; the message says what is wrong."""


def read_query(query: str) -> Asked:
    """Return the parameters of a URL by name."""
    try:
        return parse_qs(query, keep_blank_values=True, max_num_fields=1000)
    except ValueError as error:
        raise BadRequestError(f"the query cannot be read: {error}") from None


def read_curve_question(asked: Asked) -> CurveQuestion:
    """Return the question for curves."""
    axis = _text(asked, "axis")
    if axis not in get_args(ShownAxis):
        raise BadRequestError(f"axis={axis!r}: say one of {', '.join(get_args(ShownAxis))}")
    low, high = _end(asked, "low"), _end(asked, "high")
    if low is not None and high is not None and low > high:
        raise BadRequestError(f"low={low}, high={high}: low must not be above high")
    num_columns = read_index(asked, "columns")
    if not 1 <= num_columns <= _MOST_COLUMNS:
        raise BadRequestError(f"columns={num_columns}: say a number from 1 to {_MOST_COLUMNS}")
    return CurveQuestion(
        metric=_text(asked, "metric"),
        runs=[_index("run", text) for text in asked.get("run", ())],
        axis=cast("ShownAxis", axis),
        low=low,
        high=high,
        num_columns=num_columns,
    )


def read_index(asked: Asked, name: str) -> int:
    """Return a parameter that is a number from 0 on."""
    return _index(name, _text(asked, name))


def _text(asked: Asked, name: str) -> str:
    found = asked.get(name, ())
    if len(found) != 1:
        raise BadRequestError(f"{name} is there {len(found)} times; give it once")
    return found[0]


def _index(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadRequestError(f"{name}={text[:40]!r}: say a number from 0 on")
    return int(text)


def _end(asked: Asked, name: Literal["low", "high"]) -> float | None:
    if name not in asked:
        return None
    text = _text(asked, name)
    try:
        end = float(text)
    except ValueError:
        end = float("nan")
    if not isfinite(end):
        raise BadRequestError(f"{name}={text[:40]!r}: say a finite number")
    return end
