"""Dataclasses of options, whose error for an unknown argument names the nearest one that there is."""

from dataclasses import dataclass, field, is_dataclass
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, dataclass_transform

from drivetrain_accelerate.interface.module_table import PROVIDED_VERSIONS
from drivetrain_messages import suggest

Options = TypeVar("Options")


@dataclass_transform(field_specifiers=(field,))
def options(kind: type[Options]) -> type[Options]:
    """Decorate a class: make it a dataclass whose arguments are checked as in `with_known_fields`."""
    return with_known_fields(dataclass(kind))


def with_known_fields(kind: type[Options]) -> type[Options]:
    """Decorate a class: an argument that it does not have becomes a TypeError that lists those that it has."""
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
