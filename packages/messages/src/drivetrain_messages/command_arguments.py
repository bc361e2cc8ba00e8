"""Describe the arguments of a command: fields of a dataclass, from which the launcher makes the command line."""

from dataclasses import MISSING, field
from types import EllipsisType
from typing import Any, TypeVar

Value = TypeVar("Value")


def argument(
    default: Value | EllipsisType,
    text: str,
    *,
    positional: bool = False,
    repeated: bool = False,
    rest: bool = False,
    plugins: str | None = None,
    brief: str = "",
) -> Value:
    """Return the field of an argument.

    Args:
        default: The default; `...` for an argument that must be given.
        text: The help in one sentence.
        positional: Whether the argument has no flag, but a place.
        repeated: Whether the flag may be given several times.
        rest: Whether the argument takes all words after the positional one, unchanged.
        plugins: The entry point group whose names are the values.
        brief: The help in a few words, for the short help of a command with many flags.
    """
    metadata = {
        "help": text,
        "positional": positional,
        "repeated": repeated,
        "rest": rest,
        "plugins": plugins,
        "brief": brief,
    }
    known: Any = MISSING if default is ... else default
    return field(default=known, metadata=metadata)
