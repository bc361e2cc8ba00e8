"""A module of the interface, which imports what it holds when it is asked for."""

from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

from drivetrain_accelerate.interface.module_table import ModuleTable, module_table
from drivetrain_accelerate.interface.not_provided import not_provided


class InterfaceModule(ModuleType):
    """A module named `accelerate`, or inside of it, whose names are defined elsewhere in this package."""

    def __getattr__(self, name: str) -> object:
        """Return a name, or the module of that name inside; both stay as attributes."""
        table = module_table()
        module = self.__name__
        if (home := table.names[module].get(name)) is not None:
            value = getattr(import_module(home.module), home.name)
        elif (reason := table.not_provided.get(f"{module}.{name}")) is not None:
            value = not_provided(f"{module}.{name}", reason)
        elif name in table.submodules(module):
            return import_module(f"{module}.{name}")  # importlib sets the attribute
        else:
            raise AttributeError(_unknown(module, name, table), name=name, obj=self)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        """Return all names, whether or not they were asked for."""
        table = module_table()
        refused = (full.rpartition(".") for full in table.not_provided)
        return sorted(
            {
                *super().__dir__(),
                *table.names[self.__name__],
                *table.submodules(self.__name__),
                *(name for module, _, name in refused if module == self.__name__),
            }
        )


class InterfaceLoader(Loader):
    """Make modules of the interface.

    Args:
        version: The version that the package's `__version__` says.
    """

    def __init__(self, version: str) -> None:
        self._version = version

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module, which fills itself."""
        return InterfaceModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Set the names that are known without an import."""
        table = module_table()
        name = module.__name__
        module.__doc__ = f"The interface of Accelerate's {name}, over drivetrain."
        module.__all__ = sorted(table.names[name])  # pyright: ignore[reportAttributeAccessIssue] read by import *
        if name == "accelerate":
            module.__version__ = self._version  # pyright: ignore[reportAttributeAccessIssue] as the real one has


def _unknown(module: str, name: str, table: ModuleTable) -> str:
    elsewhere = [other for other, names in table.names.items() if name in names]
    hint = f"; {elsewhere[0]} has it" if elsewhere else ""
    return f"module {module!r} has no attribute {name!r} (drivetrain_accelerate provides this module{hint})"
