"""Intel's devices (XPU), read through torch, which asks Level Zero's system management."""

import sys
from collections.abc import Callable
from typing import Any

from drivetrain_memory.usage.device_reading import DeviceReading, DriverAbsentError, first_line


class IntelDriver:
    """The devices that torch's XPU backend sees."""

    def __init__(self, xpu: Any) -> None:
        self._xpu = xpu
        self._models = [str(xpu.get_device_name(index)) for index in range(xpu.device_count())]
        # What fails once, such as a system without the management library, is not asked again.
        self._missing: set[str] = set()

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the numbers of every device."""
        readings: list[DeviceReading] = []
        for index, model in enumerate(self._models):
            memory = self._ask("mem_get_info", index)
            readings.append(
                DeviceReading(
                    device=f"intel:{index}",
                    model=model,
                    used_bytes=None if memory is None else int(memory[1] - memory[0]),
                    total_bytes=None if memory is None else int(memory[1]),
                    power_watts=self._ask("power_draw", index),  # over 100 ms, for which the call sleeps
                    temperature_celsius=self._ask("temperature", index),
                    utilization_percent=self._ask("utilization", index),
                )
            )
        return tuple(readings)

    def close(self) -> None:
        """Do nothing: the library is torch's."""

    def _ask(self, name: str, index: int) -> Any:
        question: Callable[[int], Any] | None = getattr(self._xpu, name, None)
        if question is None or name in self._missing:
            return None
        try:
            return question(index)
        except (RuntimeError, ModuleNotFoundError):
            self._missing.add(name)
            return None


def open_intel() -> IntelDriver:
    """Return the driver for the devices of torch's XPU backend."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise DriverAbsentError("Intel's devices are read through torch, which this program has not imported")
    if not torch.xpu.is_available():
        raise DriverAbsentError("torch sees no Intel device (XPU)")
    try:
        return IntelDriver(torch.xpu)
    except RuntimeError as error:
        raise DriverAbsentError(f"no Intel driver: {first_line(error)}") from error
