"""Errors for other libraries' names that drivetrain lacks. An installed package lists drivetrain's counterparts."""

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Literal, cast

from drivetrain_config.plugins.installed import entry_points
from drivetrain_messages import suggest

Kind = Literal["argument", "attribute", "name"]
# Returns the library that a name belongs to and its spelling here, as "X's; here: y"; None for an unknown name.
Counterparts = Callable[[Kind, str], str | None]


def refuse_attribute(name: str) -> None:
    """Refuse another library's attribute of an Accelerator."""
    if (here := _counterpart("attribute", name)) is not None:
        raise AttributeError(f"'Accelerator' object has no attribute {name!r}, which is {here}")


def refuse_arguments(given: Iterable[str], construct: type[object]) -> None:
    """Refuse arguments that an Accelerator does not take."""
    for name in given:
        if (here := _counterpart("argument", name)) is not None:
            raise TypeError(f"Accelerator() takes no {name}=, which is {here}")
        meant = suggest(name, signature(construct).parameters, show="{}=".format)
        raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}{meant}")


def refuse_import(name: str) -> None:
    """Refuse an import of another library's name."""
    # An AttributeError would lose its message: `from drivetrain import X` replaces it with its own ImportError.
    if (here := _counterpart("name", name)) is not None:
        raise ImportError(f"cannot import {name!r} from 'drivetrain': it is {here}")


def _counterpart(kind: Kind, name: str) -> str | None:
    known = (cast("Counterparts", point.load()) for point in entry_points("drivetrain.foreign_names"))
    return next((here for find in known if (here := find(kind, name)) is not None), None)
