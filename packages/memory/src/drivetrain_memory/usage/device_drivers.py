"""The drivers of accelerators, which tell power, temperature, utilisation and memory of all processes together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """The numbers of one device as its driver tells them; None where it tells nothing.

    Attributes:
        device: The name of the driver and the index of the device in it, such as "nvidia:0".
        model: The name of the product.
        used_bytes: The memory that all processes use.
        total_bytes: The memory of the device.
        power_watts: The power that it draws.
        temperature_celsius: The temperature of the chip.
        utilization_percent: The part of the time in which it computed, 0 to 100.
    """

    device: str
    model: str
    used_bytes: int | None = None
    total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    utilization_percent: float | None = None


class DeviceDriver(Protocol):
    """The library of a vendor.

    1. Opened by a function without arguments, which raises `DriverAbsentError` if there is no package, driver or
    device. 2. `read`, any number of times, from one thread.
    3. `close`, once.
    """

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the numbers of every device, always in the same order."""
        ...

    def close(self) -> None:
        """Give the library back."""
        ...


class DriverAbsentError(RuntimeError):
    """The error of a vendor whose package, driver or devices are not here; its message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriversFound:
    """The drivers of this machine.

    Attributes:
        drivers: The drivers that answer.
        absent: The reason for each vendor whose devices cannot be read.
    """

    drivers: tuple[DeviceDriver, ...]
    absent: Mapping[str, str]


def find_drivers(openers: Mapping[str, Callable[[], DeviceDriver]] | None = None) -> DriversFound:
    """Open the drivers of all vendors whose packages and devices are here; an absent or failing one is no error.

    Args:
        openers: The functions that open a driver, by vendor; None for NVIDIA, AMD, Intel and Habana.
    """
    drivers: list[DeviceDriver] = []
    absent: dict[str, str] = {}
    for vendor, open_driver in (_openers() if openers is None else openers).items():
        try:
            drivers.append(open_driver())
        except DriverAbsentError as error:
            absent[vendor] = str(error)
        except Exception as error:  # noqa: BLE001 - a vendor's error of any kind, such as that of a lost device
            absent[vendor] = f"the driver fails: {first_line(error)}"
    return DriversFound(drivers=tuple(drivers), absent=absent)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its type."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _openers() -> Mapping[str, Callable[[], DeviceDriver]]:
    from drivetrain_memory.usage.amd import open_amd
    from drivetrain_memory.usage.habana import open_habana
    from drivetrain_memory.usage.intel import open_intel
    from drivetrain_memory.usage.nvidia import open_nvidia

    return {"nvidia": open_nvidia, "amd": open_amd, "intel": open_intel, "habana": open_habana}
