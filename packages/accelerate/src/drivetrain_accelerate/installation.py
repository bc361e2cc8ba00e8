"""Put the interface in front of the import system, here and in spawned processes, and take it back."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import spawn
from types import FunctionType, ModuleType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from drivetrain_accelerate.errors import AlreadyImportedError, UnknownVersionError
from drivetrain_accelerate.interface.finder import InterfaceFinder, installed_finder
from drivetrain_accelerate.interface.module_table import PROVIDED_VERSIONS
from drivetrain_accelerate.launch_variables import told_variables
from drivetrain_accelerate.strictness import STRICT_VARIABLE
from drivetrain_config import Layers, environ

_NAME = "accelerate"
_OPERATORS = "<>=!~"


def install(*, version: str | None = None, strict: bool | None = None) -> None:
    """Have `import accelerate` return the interface over drivetrain, in this process and from now on.

    It works whether or not the real package is installed, and changes nothing on disk. Processes that
    `multiprocessing` spawns have it too. What a launch says is put into
    the environment variables that programs for Accelerate read. A second call changes what it is told alone.

    Args:
        version: The version whose interface the program expects, such as "1.15" or ">=1.10"; the newest provided one
            if None.
        strict: Whether what Accelerate does wrong without a word is put right. False restores it where that can be
            done, here and in the processes that this one starts; None leaves it to the settings.

    Raises:
        AlreadyImportedError: The real package was imported before; the message says by what.
        UnknownVersionError: That version's interface is not provided.
        ConfigError: A setting of the launch cannot be read.
    """
    chosen = _provided(version)
    finder = installed_finder()
    if finder is None and (real := sys.modules.get(_NAME)) is not None:
        raise AlreadyImportedError(_said_too_late(real))
    variables = told_variables(Layers.of_process())
    if strict is not None:
        variables[STRICT_VARIABLE] = str(strict).lower()
    before = {name: environ.read(name) for name in variables}
    environ.put(**variables)
    if finder is None:
        sys.meta_path.insert(0, InterfaceFinder(version=chosen, variables_before=before))
        carry_to_spawned(partial(install, version=chosen))
    else:
        both = {**before, **finder.variables_before}
        sys.meta_path[sys.meta_path.index(finder)] = replace(finder, variables_before=both)


def uninstall() -> None:
    """Take the interface out of the import system, and what it has put into the environment.

    Modules that imported it keep what they hold. The next `import accelerate` finds the real package, if any.
    """
    if (finder := installed_finder()) is None:
        return
    sys.meta_path.remove(finder)
    stop_carrying()
    environ.put(**finder.variables_before)
    for name in [each for each in sys.modules if each.partition(".")[0] == _NAME]:
        del sys.modules[name]


def is_installed() -> bool:
    """Return whether `import accelerate` finds the interface over drivetrain."""
    return installed_finder() is not None


def _provided(wanted: str | None) -> str:
    """Return the newest provided version that fulfils a wish."""
    if wanted is None:
        return PROVIDED_VERSIONS[-1]
    try:
        required = SpecifierSet(wanted if wanted[:1] in _OPERATORS else f"=={wanted}")
    except InvalidSpecifier:
        found = []
    else:
        found = [each for each in PROVIDED_VERSIONS if required.contains(each)]
    if not found:
        raise UnknownVersionError(
            f"install(version={wanted!r}): provided are {', '.join(PROVIDED_VERSIONS)}; say one of these, or a "
            "requirement that one fulfils, such as '>=1.10'; or leave it out for the newest"
        )
    return found[-1]


def _said_too_late(real: ModuleType) -> str:
    holders = sorted(
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in (_NAME, "__mp_main__") and _holds(module, real)
    )
    shown = f" by {', '.join(holders[:3])}" if holders else ""
    return (
        f"accelerate {getattr(real, '__version__', '')} was imported before{shown} (from {real.__file__}), and its "
        "objects may be in use: call drivetrain_accelerate.install() before anything that imports accelerate, or run "
        "the program by `python -m drivetrain_accelerate`"
    )


def _holds(module: object, real: ModuleType) -> bool:
    """Return whether a module holds the real package or something that it defines."""
    values = list(vars(module).values()) if isinstance(module, ModuleType) else []
    return any(
        value is real
        or (
            # By its type alone: torch has objects that warn when `isinstance` asks for their class.
            issubclass(type(value), (type, FunctionType))
            and str(getattr(value, "__module__", "")).partition(".")[0] == _NAME
        )
        for value in values
    )


@dataclass(frozen=True)
class CarriedInstallation:
    """The installation of the interface in the process that unpickles it."""

    install: Callable[[], None]

    def __reduce__(self) -> Any:
        return self.install, ()


@dataclass(frozen=True)
class _PreparationWithInterface:
    """The data that a spawned process reads before it imports the program's main module, with the installation."""

    own: Callable[[str], dict[str, Any]]
    carried: CarriedInstallation

    def __call__(self, name: str) -> dict[str, Any]:
        """Return the data for a process."""
        return {**self.own(name), "drivetrain_accelerate": self.carried}


def carry_to_spawned(install: Callable[[], None]) -> None:
    """Install the interface in the processes that are spawned from now on, before they import the main module."""
    stop_carrying()
    # Python has no hook for it. The function that collects the data is replaced: the process unpickles all of the
    # data, and leaves out keys that it does not know.
    carried = CarriedInstallation(install)
    spawn.get_preparation_data = _PreparationWithInterface(spawn.get_preparation_data, carried)


def stop_carrying() -> None:
    """Leave the processes that are spawned from now on as they are."""
    if isinstance(spawn.get_preparation_data, _PreparationWithInterface):
        spawn.get_preparation_data = spawn.get_preparation_data.own
