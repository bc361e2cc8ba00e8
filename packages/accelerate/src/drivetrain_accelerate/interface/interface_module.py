"""The modules of the interface: each imports an object when its name is first used."""

import sys
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, NoReturn, TypeVar

from drivetrain_accelerate.errors import NotProvidedError
from drivetrain_accelerate.interface.module_table import module_table

Anything = TypeVar("Anything")


class _Refusing(type):
    """The metaclass of stand-ins for names without a counterpart: importing is allowed, using is an error."""

    refusal: str

    def __call__(cls, *_: Any, **given: Any) -> NoReturn:
        named = f" (given: {', '.join(given)})" if given else ""
        raise NotProvidedError(f"{cls.refusal}{named}")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python and inspect look for
            raise AttributeError(name)
        raise NotProvidedError(cls.refusal)


class InterfaceModule(ModuleType):
    """A module `accelerate` or `accelerate.NAME`; its names are defined elsewhere in this package.

    The module also has unambiguous names of the other modules, since the real modules import from each other.
    """

    def __getattr__(self, name: str) -> object:
        """Return the object or submodule of a name, and keep it as an attribute."""
        table = module_table()
        module = self.__name__
        if (holder := table.holder(module, name)) is not None:
            if (home := table.names[holder].get(name)) is not None:
                value: object = getattr(import_module(home.module), home.name)
            else:
                full = f"{holder}.{name}"
                refusal = f"{full} is not provided by drivetrain_accelerate: {table.not_provided[full]}"
                value = _Refusing(name, (), {"__module__": holder, "__doc__": refusal, "refusal": refusal})
        elif name in table.submodules(module):
            return import_module(f"{module}.{name}")  # importlib sets the attribute
        else:
            text = f"module {module!r}, which drivetrain_accelerate provides, has no attribute {name!r}"
            # Without obj=, in which Python would look for a second suggestion.
            raise AttributeError(f"{text}{table.hint(module, name)}", name=name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        """Return all names, whether or not they were asked for."""
        return sorted({*super().__dir__(), *module_table().names_in(self.__name__)})


def in_use(full_name: str, own: Anything) -> Anything:
    """Return the object that a program has set under a full name, as a patch; without a patch, `own`."""
    module, _, name = full_name.rpartition(".")
    found = sys.modules.get(module)
    return vars(found).get(name, own) if isinstance(found, InterfaceModule) else own


# What a module of a command does as a program: `python -m`, runpy and debuggers ask for its code.
_AS_PROGRAM = """from {module} import main

if __name__ == "__main__":
    main()
"""


class InterfaceLoader(InspectLoader):
    """A loader that makes the modules of the interface; the top module gets a version and a file."""

    def __init__(self, version: str, file: str) -> None:
        self._version = version
        self._file = file

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module; its names are filled in when they are used."""
        return InterfaceModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Set the names that are known without an import."""
        table = module_table()
        name = module.__name__
        module.__doc__ = f"The interface of Accelerate's {name}, over drivetrain."
        module.__all__ = sorted(table.names[name])  # pyright: ignore[reportAttributeAccessIssue] read by import *
        # Also of a module without others inside: Python then asks for a module where a name is not found, and shows
        # what the finder says of it.
        module.__path__ = []
        if name == "accelerate":
            module.__version__ = self._version  # pyright: ignore[reportAttributeAccessIssue] as the real one has
            module.__file__ = self._file

    def is_package(self, fullname: str) -> bool:
        """Return whether a module has submodules."""
        return module_table().is_package(fullname)

    def get_source(self, fullname: str) -> str:
        """Return the source that runs if a module is started as a program: a command's `main`, or nothing."""
        return _AS_PROGRAM.format(module=fullname) if "main" in module_table().names[fullname] else ""

    def get_code(self, fullname: str) -> CodeType:
        """Return the compiled source that runs if a module is started as a program."""
        return self.source_to_code(self.get_source(fullname), f"<{fullname} of drivetrain_accelerate>")
