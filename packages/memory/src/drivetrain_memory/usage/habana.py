"""Intel Gaudi devices, read as hl-smi does, through Habana's own package habana-pyhlml."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from drivetrain_memory.usage.device_reading import DeviceReading, DriverAbsentError, first_line

_SENSOR_ON_CHIP = 0  # HLML_TEMPERATURE_ON_AIP


class HabanaDriver:
    """The devices that HLML tells of."""

    def __init__(self, library: Any) -> None:
        self._library = library
        handles = [library.hlmlDeviceGetHandleByIndex(index) for index in range(library.hlmlDeviceGetCount())]
        self._devices = [(handle, _text(library.hlmlDeviceGetName(handle))) for handle in handles]

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the numbers of every device."""
        return tuple(self._read(index, handle, model) for index, (handle, model) in enumerate(self._devices))

    def close(self) -> None:
        """Give the library back."""
        self._library.hlmlShutdown()

    def _read(self, index: int, handle: object, model: str) -> DeviceReading:
        library = self._library
        memory = self._ask(lambda: library.hlmlDeviceGetMemoryInfo(handle))
        power = self._ask(lambda: library.hlmlDeviceGetPowerUsage(handle))  # milliwatts
        rates = self._ask(lambda: library.hlmlDeviceGetUtilizationRates(handle))
        return DeviceReading(
            device=f"habana:{index}",
            model=model,
            used_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
            power_watts=None if power is None else power / 1000,
            temperature_celsius=self._ask(lambda: library.hlmlDeviceGetTemperature(handle, _SENSOR_ON_CHIP)),
            # Its name differs between versions of the package.
            utilization_percent=None if rates is None else getattr(rates, "aip", getattr(rates, "gpu", None)),
        )

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._library.HLMLError:  # the device does not have the number
            return None


def open_habana() -> HabanaDriver:
    """Open Habana's library HLML."""
    try:
        library: Any = import_module("pyhlml")
    except (ImportError, OSError) as error:
        raise DriverAbsentError(
            f"Habana's package habana-pyhlml does not import ({first_line(error)})"
        ) from error
    try:
        library.hlmlInit()
    except (OSError, AttributeError, library.HLMLError) as error:
        raise DriverAbsentError(f"no Habana driver: {first_line(error)}") from error
    driver = HabanaDriver(library)
    if not library.hlmlDeviceGetCount():
        driver.close()
        raise DriverAbsentError("the Habana driver knows no device")
    return driver


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
