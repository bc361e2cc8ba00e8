"""Carry the installation of the interface to the processes that `multiprocessing` spawns, such as workers."""

from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

Prepare = Callable[[str], dict[str, Any]]


class CarriedInstallation:
    """The installation of the interface in the process that unpickles it.

    Args:
        version: The version whose interface is provided; None for the newest.
    """

    def __init__(self, version: str | None = None) -> None:
        self._version = version

    def __reduce__(self) -> Any:
        return _install, (self._version,)


class _PreparationWithInterface:
    """The data that a spawned process reads before it imports the program's main module, with the installation.

    Python has no hook for it. The function that collects the data is replaced, as the process unpickles all of it
    and leaves out keys that it does not know.
    """

    def __init__(self, own: Prepare, version: str) -> None:
        self.own = own
        self.version = version

    def __call__(self, name: str) -> dict[str, Any]:
        """Return the data for a process."""
        return {**self.own(name), "drivetrain_accelerate": CarriedInstallation(self.version)}


def carry_to_spawned(version: str) -> None:
    """Install the interface in the processes that are spawned from now on, before they import the main module.

    Args:
        version: The version whose interface is provided.
    """
    stop_carrying()
    spawn.get_preparation_data = _PreparationWithInterface(spawn.get_preparation_data, version)


def stop_carrying() -> None:
    """Leave the processes that are spawned from now on as they are."""
    if isinstance(spawn.get_preparation_data, _PreparationWithInterface):
        spawn.get_preparation_data = spawn.get_preparation_data.own


def _install(version: str | None) -> None:
    from drivetrain_accelerate.installation import install

    install(version=version)
