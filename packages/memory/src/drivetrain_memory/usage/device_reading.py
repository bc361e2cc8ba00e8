"""The protocol of a driver of accelerators: its readings, and the error of a driver that is not here."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """The numbers that a driver reports of one device; None for a number that it does not report."""

    device: str  # the name of the driver and the index of the device in it, such as "nvidia:0"
    model: str
    used_bytes: int | None = None  # by all processes
    total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    utilization_percent: float | None = None  # the part of the time in which it computed, 0 to 100


class DeviceDriver(Protocol):
    """The library of a vendor.

    1. Opened by a function without arguments, which raises `DriverAbsentError` without package, driver or device.
    2. `read`, any number of times, from one thread.
    3. `close`, once.
    """

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the numbers of every device, always in the same order."""
        ...

    def close(self) -> None:
        """Shut the library down."""
        ...


class DriverAbsentError(RuntimeError):
    """The error of a vendor whose package, driver or devices are not here; its message says which."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its type."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
