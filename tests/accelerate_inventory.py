"""The public names of the installed Accelerate: its modules, classes, functions, methods and their parameters."""

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from drivetrain_accelerate.interface.module_table import module_table


def modules() -> Iterator[ModuleType]:
    """Import every module of the real package."""
    import accelerate

    yield accelerate
    for found in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if not found.name.startswith(tuple(module_table().modules_not_provided)):
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", FutureWarning
                )  # of a module that only warns that it has moved
                module = importlib.import_module(found.name)
            yield module


def names() -> dict[str, Any]:
    """Return every public name by its full name, with its value.

    A module's names are those that it defines and, of a package, those of Accelerate's that it hands on.
    """
    found: dict[str, Any] = {}
    constants = vars(importlib.import_module("accelerate.utils.constants"))
    for module in modules():
        is_package = hasattr(module, "__path__")
        for name, value in vars(module).items():
            if name.startswith("_") or inspect.ismodule(value) or name == "TYPE_CHECKING":
                continue
            home = getattr(value, "__module__", None)
            # A constant does not tell where it is defined: one of accelerate.utils.constants is of that module.
            is_constant = home is None and name.isupper()
            is_own = home == module.__name__ or (is_constant and name not in constants)
            is_handed_on = is_package and (is_constant or str(home).partition(".")[0] == "accelerate")
            if is_own or is_handed_on or module.__name__ == "accelerate.utils.constants":
                found[f"{module.__name__}.{name}"] = value
    return found


def members(value: type) -> dict[str, Any]:
    """Return the public members of a class, those of its bases in the package included."""
    bases = [base for base in value.__mro__ if base.__module__.partition(".")[0] == "accelerate"]
    return {
        name: member
        for base in reversed(bases)
        for name, member in vars(base).items()
        if not name.startswith("_")
    }


def parameters(value: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of a callable; None if it does not tell them."""
    try:
        return list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return None
