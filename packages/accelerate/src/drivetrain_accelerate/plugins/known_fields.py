"""Tell of an argument that a class does not have, by the nearest one that it has."""

from dataclasses import is_dataclass
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from drivetrain_accelerate.interface.module_table import PROVIDED_VERSIONS
from drivetrain_messages import suggest

Options = TypeVar("Options")


def with_known_fields(kind: type[Options]) -> type[Options]:
    """Decorate a class, so that an argument which it does not have is an error that says which ones there are.

    Raises:
        TypeError: At the construction of an instance, if a field of a dataclass, or another argument, is unknown.
    """
    construct = kind.__init__
    _, *known = signature(construct).parameters
    what = "field" if is_dataclass(kind) else "argument"

    @wraps(construct)
    def init(self: Options, *args: Any, **kwargs: Any) -> None:
        if unknown := next((name for name in kwargs if name not in known), None):
            raise TypeError(
                f"{kind.__name__}() got an unexpected keyword argument {unknown!r}: Accelerate "
                f"{PROVIDED_VERSIONS[-1]}, whose interface is provided, has no such {what}"
                f"{suggest(unknown, known)}. The {what}s are {', '.join(known)}"
            )
        construct(self, *args, **kwargs)

    kind.__init__ = init
    return kind
