"""Tell of a field that a class of options does not have, by the nearest one that it has."""

from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from drivetrain_accelerate.interface.module_table import PROVIDED_VERSIONS

Options = TypeVar("Options")


def with_known_fields(kind: type[Options]) -> type[Options]:
    """Decorate a dataclass of options, so that an unknown field is an error that says which ones there are.

    Raises:
        TypeError: At the construction of an instance, if a field is unknown.
    """
    known = [each.name for each in fields(kind) if each.init]  # pyright: ignore[reportArgumentType] a dataclass
    construct = kind.__init__

    @wraps(construct)
    def init(self: Options, *args: Any, **kwargs: Any) -> None:
        if unknown := next((name for name in kwargs if name not in known), None):
            near = get_close_matches(unknown, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else "."
            raise TypeError(
                f"{kind.__name__}() got an unexpected keyword argument {unknown!r}: Accelerate "
                f"{PROVIDED_VERSIONS[-1]}, whose interface is provided, has no such field{meant} The fields are "
                f"{', '.join(known)}"
            )
        construct(self, *args, **kwargs)

    kind.__init__ = init
    return kind
