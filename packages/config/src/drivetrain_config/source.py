"""The source of a value, and a value with its source."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["code", "command line", "environment", "file", "default"]


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a value.

    Attributes:
        kind: The layer of the value.
        where: The flag, the variable, or the file with its line. For code and default: the library that chose the
            value in place of the program or the field; empty without such a library.
    """

    kind: Kind
    where: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "command line":
                return f"{self.where} on the command line"
            case "environment":
                return f"{self.where} in the environment"
            case "file":
                return self.where
            case _:
                return self.where or self.kind


@dataclass(frozen=True, slots=True, repr=False)
class Entry:
    """A value as given: text from a command line or variable, or a typed value from a file or code.

    A secret is masked in messages and not passed on; other processes read the secret from its `file`.
    """

    value: Any
    source: Source
    secret: bool = False
    file: Path | None = None

    @property
    def shown(self) -> str:
        """The value for a message; a secret is masked."""
        return "***" if self.secret else repr(self.value)

    def __repr__(self) -> str:
        return f"Entry({self.shown}, {str(self.source)!r})"
