"""Define a command's arguments: fields with a default and a help text."""

from dataclasses import field
from typing import TypeVar

Value = TypeVar("Value")


def flag(default: Value, text: str) -> Value:
    """Return the field of a flag, from which the launcher makes the command line."""
    return field(default=default, metadata={"help": text})
