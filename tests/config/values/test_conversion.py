import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_config.values.conversion import ConversionError, convert
from drivetrain_config.values.kinds import plain


class Color(Enum):
    RED = "red"
    DARK_BLUE = "dark blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size={self.size!r}: must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    path: Path | None = None


Precision = Literal["no", "fp16", "bf16"]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("true", bool, True),
        ("On", bool, True),
        ("0", bool, False),
        ("12", int, 12),
        ("-3", int, -3),
        ("1e-4", float, 1e-4),
        ("3", float, 3.0),
        ("3", str, "3"),
        ("runs/a", Path, Path("runs/a")),
        ("bf16", Precision, "bf16"),
        ("2", Literal[1, 2], 2),
        ("red", Color, Color.RED),
        ("DARK_BLUE", Color, Color.DARK_BLUE),
        ("2", Level, Level.HIGH),
        ("none", int | None, None),
        ("null", Optional[str], None),  # noqa: UP045  # both spellings of a union are met in sections
        ("none", Literal["none", "fp16"] | None, "none"),
        ("5", int | str, 5),
        ("5", str | int, 5),
        ("a5", int | str, "a5"),
        ("auto", int | Literal["auto"], "auto"),
        ("a, b,c", tuple[str, ...], ("a", "b", "c")),
        ("", tuple[str, ...], ()),
        ("[1, 2]", list[int], [1, 2]),
        ("1,x", tuple[int, str], (1, "x")),
        ("0,gpu", tuple[int | str, ...], (0, "gpu")),
        ("1,2", Sequence[int], (1, 2)),
        ('{"a": 1}', dict[str, int], {"a": 1}),
        ("a=1, b=2", dict[str, int], {"a": 1, "b": 2}),
        ("a=1", Mapping[str, int], {"a": 1}),
        ('{"1": "x"}', dict[int, str], {1: "x"}),
        ('{"size": 2, "names": ["a"]}', Inner, Inner(size=2, names=("a",))),
        ("size=2", Inner, Inner(size=2)),
        ('{"inner": {"size": 2}, "path": "p"}', Outer, Outer(inner=Inner(size=2), path=Path("p"))),
        ("anything", Any, "anything"),
    ],
)
def test_text_stands_for_what_it_spells(text: str, kind: Any, value: Any) -> None:
    found = convert(text, kind, text=True)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("given_value", "kind", "value"),
    [
        (3, float, 3.0),
        ("1e-4", float, 1e-4),
        (False, Precision, "no"),
        ("5", int | str, "5"),
        ("none", str | None, "none"),
        (None, str | None, None),
        ("jsonl", tuple[str, ...], ("jsonl",)),
        (["a"], tuple[str, ...], ("a",)),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ({"size": 1}, Inner, Inner(size=1)),
        (Inner(size=1), Inner, Inner(size=1)),
        ("p", str | Path, "p"),
        (5.0, int | float, 5.0),
        (5, float | int, 5),
    ],
)
def test_a_value_from_a_file_or_code_keeps_its_meaning(given_value: Any, kind: Any, value: Any) -> None:
    found = convert(given_value, kind)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("yes", int, "must be an integer$"),
        (True, int, "must be an integer$"),
        (True, float, "must be a number$"),
        (1.5, int, "must be an integer$"),
        ("5", int, "must be an integer; take it out of its quotes$"),
        ("true", bool, "must be true or false; take it out of its quotes$"),
        (1, bool, "must be true or false$"),
        (123, str, "must be text; put it in quotes$"),
        (False, str, "must be text; put it in quotes$"),
        (None, str, "must be text$"),
        ("", Path, "must be a path$"),
        (3, Path, "must be a path$"),
        ("x", float, "must be a number$"),
        ([], float, "must be a number$"),
        ("bf17", Precision, "must be one of 'no', 'fp16', 'bf16'; did you mean bf16"),
        (True, Precision, "must be one of 'no', 'fp16', 'bf16'"),
        (True, Literal[1, 2], "must be one of 1, 2"),
        ("blu", Color, "must be one of 'red', 'dark blue'"),
        ("x", int | None, "must be an integer or null$"),
        ({}, int | str, "must be an integer or text$"),
        ([1, "x"], tuple[int, ...], "item 1, 'x', must be an integer$"),
        ([1, "x"], tuple[int, ...] | None, "item 1, 'x', must be an integer$"),
        ([1], tuple[int, int], "must be a list of 2: an integer, an integer; there are 1$"),
        ([1, 2], tuple[int], "must be a list of 1: an integer; there are 2$"),
        (3, list[int], "must be a list, each item an integer; as text"),
        (3, dict[str, int], "must be a mapping; as text"),
        ({"a": "x"}, dict[str, int], "a, 'x', must be an integer$"),
        ({"sise": 1}, Inner, "has no 'sise'; did you mean size; allowed are size, names$"),
        ({}, Inner, "needs 'size', an integer$"),
        ({"size": -1}, Inner, "size=-1: must be at least 0$"),
        ({"inner": {"size": "x"}}, Outer, "inner, .*, size, 'x', must be an integer$"),
        (3, Inner, "must be a mapping with size, names; as text"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_what_is_allowed(
    value: Any, kind: Any, message: str
) -> None:
    with pytest.raises(ConversionError, match=message):
        convert(value, kind)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("maybe", bool),
        ("1.5", int),
        ("[1", list[int]),
        ("{", dict[str, int]),
        ("a", dict[str, int]),
        ("{", Inner),
    ],
)
def test_text_that_spells_nothing_is_refused(text: str, kind: Any) -> None:
    with pytest.raises(ConversionError, match="must be"):
        convert(text, kind, text=True)


def test_a_type_that_no_setting_may_have_is_the_authors_mistake() -> None:
    with pytest.raises(TypeError, match="is not a type that a setting may have"):
        convert(3, type[int])


def test_a_path_in_the_home_folder_is_found_there() -> None:
    assert convert("~/runs", Path) == Path.home() / "runs"


def test_numbers_of_other_libraries_become_pythons() -> None:
    class Eight:
        def __index__(self) -> int:
            return 8

        def __float__(self) -> float:
            return 8.0

    assert (convert(Eight(), int), convert(Eight(), float)) == (8, 8.0)


_TEXT = st.text(max_size=8)
_SECTION = st.builds(Inner, size=st.integers(0, 9), names=st.lists(_TEXT, max_size=3).map(tuple))


@given(
    st.one_of(
        st.tuples(st.just(int), st.integers()),
        st.tuples(st.just(bool), st.booleans()),
        st.tuples(st.just(float), st.floats(allow_nan=False)),
        st.tuples(st.just(str), _TEXT),
        st.tuples(st.just(str | None), st.none() | _TEXT),
        st.tuples(st.just(int | bool | str | None), st.none() | st.integers() | st.booleans() | _TEXT),
        st.tuples(st.just(Path), _TEXT.filter(lambda text: not text.startswith("~")).map(Path)),
        st.tuples(st.just(Precision), st.sampled_from(["no", "fp16", "bf16"])),
        st.tuples(st.just(Color), st.sampled_from(Color)),
        st.tuples(st.just(Level | None), st.none() | st.sampled_from(Level)),
        st.tuples(st.just(tuple[int, ...]), st.lists(st.integers(), max_size=3).map(tuple)),
        st.tuples(st.just(tuple[bool, str]), st.tuples(st.booleans(), _TEXT)),
        st.tuples(st.just(list[list[float]]), st.lists(st.lists(st.floats(allow_nan=False), max_size=2))),
        st.tuples(st.just(dict[int, str]), st.dictionaries(st.integers(), _TEXT, max_size=3)),
        st.tuples(st.just(Outer), st.builds(Outer, inner=_SECTION, path=st.none() | st.just(Path("p")))),
    )
)
def test_a_value_written_as_json_is_read_back_the_same(pair: tuple[Any, Any]) -> None:
    kind, value = pair
    found = convert(json.loads(json.dumps(plain(value))), kind)
    assert found == value
    assert type(found) is type(value)


@given(st.integers(), st.floats(allow_nan=False), st.booleans())
def test_what_python_writes_is_what_text_spells(integer: int, number: float, switch: bool) -> None:
    found = [convert(str(value), type(value), text=True) for value in (integer, number, switch)]
    assert found == [integer, number, switch]
