"""The errors for Accelerate names that drivetrain does not have; each message names the counterpart."""

from collections.abc import Iterable
from inspect import signature
from typing import TYPE_CHECKING, Any

from drivetrain.interop.accelerate_names import counterpart
from drivetrain_messages import suggest


class ForeignNames:
    """A base class that raises AttributeError for Accelerate attributes, with the counterpart in the message."""

    if not TYPE_CHECKING:  # else a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            refuse_attribute(name)
            return object.__getattribute__(self, name)  # raises the usual AttributeError

        def __setattr__(self, name: str, value: object) -> None:
            refuse_attribute(name)
            object.__setattr__(self, name, value)


def refuse_attribute(name: str) -> None:
    """Refuse an Accelerate attribute that drivetrain does not have.

    Raises:
        AttributeError: The name belongs to Accelerate; the message names the counterpart.
    """
    if (here := counterpart("attribute", name)) is not None:
        raise AttributeError(
            f"'Accelerator' object has no attribute {name!r}, which is Accelerate's; here: {here}"
        )


def refuse_arguments(given: Iterable[str], construct: type[object]) -> None:
    """Refuse arguments that an Accelerator does not take.

    Raises:
        TypeError: There is such an argument; the message names the counterpart, or the nearest argument.
    """
    for name in given:
        if (here := counterpart("argument", name)) is not None:
            raise TypeError(f"Accelerator() takes no {name}=, which is Accelerate's; here: {here}")
        meant = suggest(name, signature(construct).parameters, show="{}=".format)
        raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}{meant}")


def refuse_import(name: str) -> None:
    """Refuse an import of an Accelerate name that drivetrain does not have.

    Raises:
        ImportError: The name belongs to Accelerate; the message names the counterpart.
    """
    # An AttributeError would lose its message: `from drivetrain import X` replaces it with its own ImportError.
    if (here := counterpart("name", name)) is not None:
        raise ImportError(f"cannot import {name!r} from 'drivetrain': it is Accelerate's; here: {here}")
