"""Open the drivers of accelerators, which tell power, temperature, utilisation and memory of all processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from drivetrain_memory.usage.amd import open_amd
from drivetrain_memory.usage.device_reading import DeviceDriver, DriverAbsentError, first_line
from drivetrain_memory.usage.habana import open_habana
from drivetrain_memory.usage.intel import open_intel
from drivetrain_memory.usage.nvidia import open_nvidia

_OPENERS: Mapping[str, Callable[[], DeviceDriver]] = {
    "nvidia": open_nvidia,
    "amd": open_amd,
    "intel": open_intel,
    "habana": open_habana,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DriversFound:
    """The drivers of this machine.

    Attributes:
        absent: The reason for each vendor whose devices cannot be read.
    """

    drivers: tuple[DeviceDriver, ...]
    absent: Mapping[str, str]


def find_drivers(openers: Mapping[str, Callable[[], DeviceDriver]] | None = None) -> DriversFound:
    """Open the drivers of all vendors whose packages and devices are here; an absent or failing one is no error."""
    drivers: list[DeviceDriver] = []
    absent: dict[str, str] = {}
    for vendor, open_driver in (_OPENERS if openers is None else openers).items():
        try:
            drivers.append(open_driver())
        except DriverAbsentError as error:
            absent[vendor] = str(error)
        except Exception as error:  # noqa: BLE001 - a vendor's error of any kind, such as that of a lost device
            absent[vendor] = f"the driver fails: {first_line(error)}"
    return DriversFound(drivers=tuple(drivers), absent=absent)
