"""Carry the installation of the interface to the processes that `multiprocessing` spawns, such as workers."""

from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

Prepare = Callable[[str], dict[str, Any]]


class CarriedInstallation:
    """The installation of the interface in the process that unpickles it."""

    def __init__(self, install: Callable[[], None]) -> None:
        self._install = install

    def __reduce__(self) -> Any:
        return self._install, ()


class _PreparationWithInterface:
    """The data that a spawned process reads before it imports the program's main module, with the installation.

    Python has no hook for it. The function that collects the data is replaced, as the process unpickles all of it
    and leaves out keys that it does not know.
    """

    def __init__(self, own: Prepare, carried: CarriedInstallation) -> None:
        self.own = own
        self.carried = carried

    def __call__(self, name: str) -> dict[str, Any]:
        """Return the data for a process."""
        return {**self.own(name), "drivetrain_accelerate": self.carried}


def carry_to_spawned(install: Callable[[], None]) -> None:
    """Install the interface in the processes that are spawned from now on, before they import the main module."""
    stop_carrying()
    carried = CarriedInstallation(install)
    spawn.get_preparation_data = _PreparationWithInterface(spawn.get_preparation_data, carried)


def stop_carrying() -> None:
    """Leave the processes that are spawned from now on as they are."""
    if isinstance(spawn.get_preparation_data, _PreparationWithInterface):
        spawn.get_preparation_data = spawn.get_preparation_data.own
