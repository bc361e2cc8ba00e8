"""NVIDIA's and Intel Gaudi's devices: Habana's library HLML has NVML's functions under other names."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from drivetrain_memory.usage.device_reading import DeviceReading, DriverAbsentError, first_line

_SENSOR_ON_CHIP = 0  # NVML_TEMPERATURE_GPU, HLML_TEMPERATURE_ON_AIP


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlLibrary:
    """A library with NVML's functions."""

    vendor: str
    package: str
    prefix: str  # of all its names
    absent: str  # the message for a package that does not import

    def open(self) -> "NvmlDriver":
        """Open the library, or raise `DriverAbsentError` without its package, driver or a device."""
        try:
            library: Any = import_module(self.package)
        except (ImportError, OSError) as error:
            raise DriverAbsentError(f"{self.absent} ({first_line(error)})") from error
        try:
            getattr(library, f"{self.prefix}Init")()
        except (OSError, AttributeError, self.error_of(library)) as error:
            raise DriverAbsentError(f"no {self.vendor} driver: {first_line(error)}") from error
        driver = NvmlDriver(self, library)
        if not driver.read():
            driver.close()
            raise DriverAbsentError(f"the {self.vendor} driver knows no device")
        return driver

    def error_of(self, library: Any) -> type[Exception]:
        """Return the class of the library's errors."""
        return getattr(library, f"{self.prefix.upper()}Error")


NVIDIA = NvmlLibrary(
    vendor="NVIDIA",
    package="pynvml",
    prefix="nvml",
    absent="the package nvidia-ml-py is not installed: pip install 'drivetrain-memory[nvidia]'",
)
HABANA = NvmlLibrary(
    vendor="Habana", package="pyhlml", prefix="hlml", absent="Habana's package habana-pyhlml does not import"
)


class NvmlDriver:
    """The devices that an initialised library reports, in its order: NVML's by PCI bus, hidden ones included."""

    def __init__(self, kind: NvmlLibrary, library: Any) -> None:
        self._kind, self._library = kind, library
        indices = range(self._call("DeviceGetCount"))
        handles = [self._call("DeviceGetHandleByIndex", index) for index in indices]
        names = [self._call("DeviceGetName", handle) for handle in handles]
        models = [name.decode() if isinstance(name, bytes) else name for name in names]
        self._devices = list(zip(handles, models, strict=True))

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the numbers of every device."""
        return tuple(self._read(index, handle, model) for index, (handle, model) in enumerate(self._devices))

    def close(self) -> None:
        """Shut the library down."""
        self._call("Shutdown")

    def _read(self, index: int, handle: object, model: str) -> DeviceReading:
        memory = self._ask("DeviceGetMemoryInfo", handle)
        power = self._ask("DeviceGetPowerUsage", handle)  # milliwatts
        rates = self._ask("DeviceGetUtilizationRates", handle)
        return DeviceReading(
            device=f"{self._kind.vendor.lower()}:{index}",
            model=model,
            used_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
            power_watts=None if power is None else power / 1000,
            temperature_celsius=self._ask("DeviceGetTemperature", handle, _SENSOR_ON_CHIP),
            # HLML's name differs between versions of the package.
            utilization_percent=None if rates is None else getattr(rates, "aip", getattr(rates, "gpu", None)),
        )

    def _call(self, name: str, *arguments: object) -> Any:
        return getattr(self._library, f"{self._kind.prefix}{name}")(*arguments)

    def _ask(self, name: str, *arguments: object) -> Any:
        """Return a number of a device; None if the device lacks it, such as a part of a divided device."""
        try:
            return self._call(name, *arguments)
        except self._kind.error_of(self._library):
            return None
