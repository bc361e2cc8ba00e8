"""Where a value came from, and a value together with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["code", "command line", "environment", "file", "default"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from.

    Attributes:
        kind: The layer.
        where: The flag, the variable, or the file with its line; empty for code and default.
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
                return self.kind


@dataclass(frozen=True, slots=True, repr=False)
class Entry:
    """One value as it was given: text from a command line or variable, or a typed value from a file or code.

    Attributes:
        value: The value, not yet brought to its field's type.
        source: Where it came from.
        secret: Whether it is shown and handed on nowhere.
        file: The file it was read from, so that another process can read a secret there itself.
    """

    value: Any
    source: Source
    secret: bool = False
    file: Path | None = None

    @property
    def is_text(self) -> bool:
        """Whether a string stands for what it spells."""
        return self.source.kind in ("command line", "environment")

    @property
    def shown(self) -> str:
        """The value for a message; a secret stays one."""
        return "***" if self.secret else repr(self.value)

    def __repr__(self) -> str:
        return f"Entry({self.shown}, {str(self.source)!r})"
