"""AMD's devices, read through AMD's own package amdsmi, which comes with ROCm in the version of its driver."""

from importlib import import_module
from typing import Any

from drivetrain_memory.usage.device_reading import DeviceReading, DriverAbsentError, first_line

_MB = 2**20  # the library counts video memory in these


class AmdDriver:
    """The devices that AMD SMI reports."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._devices: list[tuple[object, str]] = []
        for handle in library.amdsmi_get_processor_handles():
            about = self._ask("gpu_asic_info", handle) or {}
            self._devices.append((handle, str(about.get("market_name", "AMD device"))))

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the numbers of every device."""
        return tuple(self._read(index, handle, model) for index, (handle, model) in enumerate(self._devices))

    def close(self) -> None:
        """Shut the library down."""
        self._library.amdsmi_shut_down()

    def _read(self, index: int, handle: object, model: str) -> DeviceReading:
        memory = self._ask("gpu_vram_usage", handle) or {}
        power = self._ask("power_info", handle) or {}
        activity = self._ask("gpu_activity", handle) or {}
        used, total = _number(memory.get("vram_used")), _number(memory.get("vram_total"))
        # Newer chips tell the current power, older ones the average.
        watts = _number(power.get("current_socket_power"))
        kinds, metric = self._library.AmdSmiTemperatureType, self._library.AmdSmiTemperatureMetric.CURRENT
        sensors = (kinds.EDGE, kinds.HOTSPOT)  # data-centre chips have no edge sensor
        degrees = [_number(self._ask("temp_metric", handle, sensor, metric)) for sensor in sensors]
        return DeviceReading(
            device=f"amd:{index}",
            model=model,
            used_bytes=None if used is None else int(used * _MB),
            total_bytes=None if total is None else int(total * _MB),
            power_watts=_number(power.get("average_socket_power")) if watts is None else watts,
            temperature_celsius=next((found for found in degrees if found is not None), None),
            utilization_percent=_number(activity.get("gfx_activity")),
        )

    def _ask(self, name: str, *arguments: object) -> Any:
        try:
            return getattr(self._library, f"amdsmi_get_{name}")(*arguments)
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
    """Return a number; None for the text "N/A", the library's value for numbers that a chip lacks."""
    return float(value) if isinstance(value, int | float) else None
