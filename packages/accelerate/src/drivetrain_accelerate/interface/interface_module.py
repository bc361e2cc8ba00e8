"""A module of the interface, which imports what it holds when it is asked for."""

from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from drivetrain_accelerate.interface.module_table import ModuleTable, module_table
from drivetrain_accelerate.interface.not_provided import not_provided
from drivetrain_config.vocabulary import nearest


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
            # Without obj=, in which Python would look for a second suggestion.
            raise AttributeError(_unknown(module, name, table), name=name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        """Return all names, whether or not they were asked for."""
        return sorted({*super().__dir__(), *module_table().names_in(self.__name__)})


# What a module of a command does as a program: `python -m`, runpy and debuggers ask for its code.
_AS_PROGRAM = """from {module} import main

if __name__ == "__main__":
    main()
"""


class InterfaceLoader(InspectLoader):
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

    def is_package(self, fullname: str) -> bool:
        """Return whether a module holds others."""
        return module_table().is_package(fullname)

    def get_source(self, fullname: str) -> str:
        """Return what a module does as a program: a command runs, any other module has nothing to do."""
        return _AS_PROGRAM.format(module=fullname) if "main" in module_table().names[fullname] else ""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of what a module does as a program."""
        return self.source_to_code(self.get_source(fullname), f"<{fullname} of drivetrain_accelerate>")


def _unknown(module: str, name: str, table: ModuleTable) -> str:
    elsewhere = next((f"; {other} has it" for other, names in table.names.items() if name in names), None)
    hint = nearest(name, table.names_in(module)) if elsewhere is None else elsewhere
    return f"module {module!r}, which drivetrain_accelerate provides, has no attribute {name!r}{hint}"
