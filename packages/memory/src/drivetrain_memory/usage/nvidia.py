"""NVIDIA's devices, read by NVML through NVIDIA's own package nvidia-ml-py."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from drivetrain_memory.usage.device_reading import DeviceReading, DriverAbsentError, first_line


class NvidiaDriver:
    """The devices that NVML tells of, `CUDA_VISIBLE_DEVICES` or not, in its own order (by PCI bus)."""

    def __init__(self, library: Any) -> None:
        self._library = library
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        self._devices = [(handle, _text(library.nvmlDeviceGetName(handle))) for handle in handles]

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the numbers of every device."""
        return tuple(self._read(index, handle, model) for index, (handle, model) in enumerate(self._devices))

    def close(self) -> None:
        """Give the library back."""
        self._library.nvmlShutdown()

    def _read(self, index: int, handle: object, model: str) -> DeviceReading:
        library = self._library
        memory = self._ask(lambda: library.nvmlDeviceGetMemoryInfo(handle))
        power = self._ask(lambda: library.nvmlDeviceGetPowerUsage(handle))  # milliwatts
        rates = self._ask(lambda: library.nvmlDeviceGetUtilizationRates(handle))
        return DeviceReading(
            device=f"nvidia:{index}",
            model=model,
            used_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
            power_watts=None if power is None else power / 1000,
            temperature_celsius=self._ask(
                lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)
            ),
            utilization_percent=None if rates is None else float(rates.gpu),
        )

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return an answer; None where the device does not have the number, such as a part of a divided one."""
        try:
            return question()
        except self._library.NVMLError:
            return None


def open_nvidia() -> NvidiaDriver:
    """Open NVIDIA's library NVML."""
    try:
        library: Any = import_module("pynvml")
    except ModuleNotFoundError as error:
        raise DriverAbsentError(
            "the package nvidia-ml-py is not installed: pip install 'drivetrain-memory[nvidia]'"
        ) from error
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise DriverAbsentError(f"no NVIDIA driver: {first_line(error)}") from error
    driver = NvidiaDriver(library)
    if not library.nvmlDeviceGetCount():
        driver.close()
        raise DriverAbsentError("the NVIDIA driver knows no device")
    return driver


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
