"""Put the interface in front of the import system, and take it back."""

import sys
from types import ModuleType

from drivetrain_accelerate.errors import AlreadyImportedError, UnknownVersionError
from drivetrain_accelerate.interface.finder import InterfaceFinder
from drivetrain_accelerate.interface.interface_module import InterfaceModule
from drivetrain_accelerate.interface.module_table import PROVIDED_VERSIONS

_NAME = "accelerate"


def install(*, version: str | None = None) -> None:
    """Have `import accelerate` return the interface over drivetrain, in this process and from now on.

    It works whether or not the real package is installed, and changes nothing on disk. A second call does nothing.

    Args:
        version: The version whose interface the program expects; the newest provided one if None.

    Raises:
        AlreadyImportedError: The real package was imported before; the message says by what.
        UnknownVersionError: That version's interface is not provided.
    """
    chosen = version or PROVIDED_VERSIONS[-1]
    if chosen not in PROVIDED_VERSIONS:
        raise UnknownVersionError(
            f"install(version={version!r}): provided are {', '.join(PROVIDED_VERSIONS)}; leave it out for the newest"
        )
    if is_installed():
        return
    if (real := sys.modules.get(_NAME)) is not None:
        raise AlreadyImportedError(_said_too_late(real))
    sys.meta_path.insert(0, InterfaceFinder(version=chosen))


def uninstall() -> None:
    """Take the interface out of the import system.

    Modules that imported it keep what they hold. The next `import accelerate` finds the real package, if any.
    """
    if (finder := installed_finder()) is None:
        return
    sys.meta_path.remove(finder)
    for name, module in list(sys.modules.items()):
        if isinstance(module, InterfaceModule):
            del sys.modules[name]


def is_installed() -> bool:
    """Return whether `import accelerate` finds the interface over drivetrain."""
    return installed_finder() is not None


def installed_finder() -> InterfaceFinder | None:
    """Return the finder that answers for `accelerate`; None if the interface is not installed."""
    return next((each for each in sys.meta_path if isinstance(each, InterfaceFinder)), None)


def _said_too_late(real: ModuleType) -> str:
    holders = sorted(
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] != _NAME and _holds(module, real)
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
            isinstance(value, type | type(install))
            and str(getattr(value, "__module__", "")).partition(".")[0] == _NAME
        )
        for value in values
    )
