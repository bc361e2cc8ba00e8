from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from drivetrain_config.values.kinds import choices, describe, field_types, holds_secret, plain, shown


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True)
class Login:
    user: str = "me"
    password: str = field(default="", metadata={"secret": True})


@dataclass(frozen=True)
class Postponed:
    size: "int | None" = None
    derived: int = field(default=0, init=False)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (bool, "true or false"),
        (int | None, "an integer or null"),
        (Literal["a", "b"], "one of 'a', 'b'"),
        (Literal["auto"] | int, "'auto' or an integer"),
        (Side | None, "one of 'left', 'right' or null"),
        (tuple[int, ...], "a list, each item an integer"),
        (list, "a list, each item anything"),
        (tuple[int, str], "a list of 2: an integer, text"),
        (dict[str, float], "a mapping, each value a number"),
        (dict, "a mapping, each value anything"),
        (Login, "a mapping with user, password"),
        (Any, "anything"),
        (Path, "a path"),
    ],
)
def test_a_type_in_words(kind: Any, words: str) -> None:
    assert describe(kind) == words


def test_choices_are_told_only_where_the_list_is_closed() -> None:
    assert choices(Literal["a", 1] | None) == ("a", 1)
    assert choices(Side) == ("left", "right")
    assert choices(Literal["auto"] | int) is None


def test_a_secret_is_found_inside_other_types() -> None:
    assert holds_secret(dict[str, tuple[Login | None, ...]])
    assert not holds_secret(dict[str, Postponed])


def test_postponed_annotations_are_resolved_and_derived_fields_left_out() -> None:
    assert field_types(Postponed) == {"size": int | None}


def test_a_value_that_no_setting_has_is_not_written() -> None:
    with pytest.raises(TypeError, match="is of type object, which no setting has"):
        plain(object())


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "not set"), ((), "empty"), (True, "true"), (Side.LEFT, "left"), (Path("a"), "a"), (0, "0")],
)
def test_a_default_in_a_line_of_help(value: Any, text: str) -> None:
    assert shown(value) == text
