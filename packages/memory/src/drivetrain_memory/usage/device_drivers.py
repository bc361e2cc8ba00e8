"""Open and read the drivers of accelerators: power, temperature, utilisation and memory of all processes."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drivetrain_memory.usage.amd import open_amd
from drivetrain_memory.usage.device_reading import DeviceDriver, DeviceReading, DriverAbsentError, first_line
from drivetrain_memory.usage.intel import open_intel
from drivetrain_memory.usage.nvml import HABANA, NVIDIA

_logger = logging.getLogger(__name__)
_OPENERS: Mapping[str, Callable[[], DeviceDriver]] = {
    "nvidia": NVIDIA.open,
    "amd": open_amd,
    "intel": open_intel,
    "habana": HABANA.open,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DriversFound:
    """The drivers of this machine."""

    drivers: tuple[DeviceDriver, ...]
    absent: Mapping[str, str]  # the reason for each vendor whose devices cannot be read


def find_drivers(openers: Mapping[str, Callable[[], DeviceDriver]] | None = None) -> DriversFound:
    """Open the drivers of all vendors with packages and devices here; an absent or failing driver is no error."""
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


class DriverPoller:
    """A thread that keeps the newest readings of all devices, so that no caller waits for a slow driver."""

    def __init__(self, drivers: Sequence[DeviceDriver], *, interval_seconds: float) -> None:
        self._drivers = tuple(drivers)
        self._interval_seconds = interval_seconds
        self._ended = threading.Event()
        self.newest: tuple[DeviceReading, ...] = ()
        self._thread = threading.Thread(target=self._run, name="drivetrain-drivers", daemon=True)
        if self._drivers and self._look():
            self._thread.start()

    def close(self) -> None:
        """End the thread and close the drivers."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for driver in self._drivers:
            driver.close()

    def _look(self) -> bool:
        """Read all devices; return False if a driver failed."""
        try:
            self.newest = tuple(reading for driver in self._drivers for reading in driver.read())
        except Exception:  # a vendor's error of any kind: the numbers end, training does not
            _logger.warning("a device driver failed; its numbers end here", exc_info=True)
            return False
        return True

    def _run(self) -> None:
        while not self._ended.wait(self._interval_seconds) and self._look():
            pass
