"""What becomes of Accelerate's names that are not here: an error that says what stands for them."""

from collections.abc import Iterable
from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any

from drivetrain.accelerate_names import counterpart


class ForeignNames:
    """Has attributes of Accelerate's answer with what stands for them; `hasattr` is false for them."""

    if not TYPE_CHECKING:  # a type checker is to see what there is, not that anything could be

        def __getattr__(self, name: str) -> Any:
            refuse_attribute(name)
            return object.__getattribute__(self, name)  # raises as if this were not here

        def __setattr__(self, name: str, value: object) -> None:
            refuse_attribute(name)
            object.__setattr__(self, name, value)


def refuse_attribute(name: str) -> None:
    """Refuse an attribute of Accelerate's that is not here.

    Raises:
        AttributeError: It says what stands for it.
    """
    if (here := counterpart("attribute", name)) is not None:
        raise AttributeError(
            f"'Accelerator' object has no attribute {name!r}, which is Accelerate's; here: {here}"
        )


def refuse_arguments(given: Iterable[str], construct: type[object]) -> None:
    """Refuse arguments that an Accelerator does not take.

    Raises:
        TypeError: There is one; it says what stands for it, or which one is near.
    """
    for name in given:
        if (here := counterpart("argument", name)) is not None:
            raise TypeError(f"Accelerator() takes no {name}=, which is Accelerate's; here: {here}")
        near = get_close_matches(name, signature(construct).parameters, n=1)
        meant = f": did you mean {near[0]}=?" if near else ""
        raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}{meant}")


def refuse_import(name: str) -> None:
    """Refuse a module's name of Accelerate's that is not here.

    Raises:
        ImportError: It says what stands for it.
    """
    # An AttributeError would lose its words: `from drivetrain import X` makes an ImportError of its own of it.
    if (here := counterpart("name", name)) is not None:
        raise ImportError(f"cannot import {name!r} from 'drivetrain': it is Accelerate's; here: {here}")
