"""A finding: the one thing that every check returns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        where: The place: `path:line` for code, a package or a tool where no line is to blame.
        message: What was found, what is allowed, what to do.
    """

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"
