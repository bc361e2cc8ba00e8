"""A thread that reads device drivers: some answer slowly, and nothing else waits for them."""

import logging
import threading
from collections.abc import Sequence

from drivetrain_memory.usage.device_reading import DeviceDriver, DeviceReading

_logger = logging.getLogger(__name__)


class DriverPoller:
    """A thread that keeps the newest readings of all devices."""

    def __init__(self, drivers: Sequence[DeviceDriver], *, interval_seconds: float) -> None:
        self._drivers = tuple(drivers)
        self._interval_seconds = interval_seconds
        self._ended = threading.Event()
        self.newest: tuple[DeviceReading, ...] = ()
        self._thread = threading.Thread(target=self._run, name="drivetrain-drivers", daemon=True)
        if self._drivers and self._look():
            self._thread.start()

    def close(self) -> None:
        """End the thread and give the drivers back."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for driver in self._drivers:
            driver.close()

    def _look(self) -> bool:
        """Read all devices; return whether it succeeded."""
        try:
            self.newest = tuple(reading for driver in self._drivers for reading in driver.read())
        except Exception:  # a vendor's error of any kind: the numbers end, training does not
            _logger.warning("a device driver failed; its numbers end here", exc_info=True)
            return False
        return True

    def _run(self) -> None:
        while not self._ended.wait(self._interval_seconds) and self._look():
            pass
