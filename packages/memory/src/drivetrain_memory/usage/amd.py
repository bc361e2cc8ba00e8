"""AMD's devices, read through AMD's own package amdsmi, which comes with ROCm in the version of its driver."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from drivetrain_memory.usage.device_reading import DeviceReading, DriverAbsentError, first_line

_MB = 2**20  # the library counts video memory in these


class AmdDriver:
    """The devices that AMD SMI tells of."""

    def __init__(self, library: Any) -> None:
        self._library = library
        handles = list(library.amdsmi_get_processor_handles())
        self._devices = [(handle, self._model(handle)) for handle in handles]

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the numbers of every device."""
        return tuple(self._read(index, handle, model) for index, (handle, model) in enumerate(self._devices))

    def close(self) -> None:
        """Give the library back."""
        self._library.amdsmi_shut_down()

    def _read(self, index: int, handle: object, model: str) -> DeviceReading:
        library = self._library
        memory = self._ask(lambda: library.amdsmi_get_gpu_vram_usage(handle)) or {}
        power = self._ask(lambda: library.amdsmi_get_power_info(handle)) or {}
        activity = self._ask(lambda: library.amdsmi_get_gpu_activity(handle)) or {}
        used, total = _number(memory.get("vram_used")), _number(memory.get("vram_total"))
        # Newer chips tell the current power, older ones the average.
        watts = _number(power.get("current_socket_power"))
        return DeviceReading(
            device=f"amd:{index}",
            model=model,
            used_bytes=None if used is None else int(used * _MB),
            total_bytes=None if total is None else int(total * _MB),
            power_watts=_number(power.get("average_socket_power")) if watts is None else watts,
            temperature_celsius=self._temperature(handle),
            utilization_percent=_number(activity.get("gfx_activity")),
        )

    def _temperature(self, handle: object) -> float | None:
        library = self._library
        metric = library.AmdSmiTemperatureMetric.CURRENT
        for sensor in ("EDGE", "HOTSPOT"):  # data-centre chips have no edge sensor
            kind = getattr(library.AmdSmiTemperatureType, sensor)
            found = _number(self._ask(lambda kind=kind: library.amdsmi_get_temp_metric(handle, kind, metric)))
            if found is not None:
                return found
        return None

    def _model(self, handle: object) -> str:
        about = self._ask(lambda: self._library.amdsmi_get_gpu_asic_info(handle)) or {}
        return str(about.get("market_name", "AMD device"))

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._library.AmdSmiLibraryException:  # the device does not have the number
            return None


def open_amd() -> AmdDriver:
    """Open AMD SMI."""
    try:
        library: Any = import_module("amdsmi")
    except (ImportError, OSError, KeyError) as error:  # its import loads the driver's library
        raise DriverAbsentError(
            f"AMD's package amdsmi, which ROCm brings, does not import ({first_line(error)})"
        ) from error
    try:
        library.amdsmi_init(library.AmdSmiInitFlags.INIT_AMD_GPUS)
    except library.AmdSmiLibraryException as error:
        raise DriverAbsentError(f"no AMD driver: {first_line(error)}") from error
    driver = AmdDriver(library)
    if not driver.read():
        driver.close()
        raise DriverAbsentError("the AMD driver knows no device")
    return driver


def _number(value: object) -> float | None:
    """Return a number; None for the text "N/A", which the library writes for what a chip does not have."""
    return float(value) if isinstance(value, int | float) else None
