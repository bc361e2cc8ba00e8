"""The measurements of many steps, in arrays: an object for each would itself be memory that grows with the steps."""

from array import array

from drivetrain_memory.leaks.growth import LEAST_POINTS, Growth, fit_growth
from drivetrain_memory.leaks.measure import MemorySample

_MOST_SAMPLES = 512
# The smallest growth over the fitted points that raises suspicion, by measurement: bytes, or blocks of Python.
_LEAST_TOTALS = {
    "heap_used": 32 << 10,
    "python_blocks": 100,
    "resident": 8 << 20,
    "device_allocated": 4096,
    "pinned": 1,
    "children": 1 << 20,
}
SUSPICIOUS = frozenset(_LEAST_TOTALS)
_NAMES = ("step", *_LEAST_TOTALS, "heap_free", "device_reserved")


class Measurements:
    """The measurements of a run: of every step, and once there are many, of every second, fourth and so on.

    Attributes:
        stride: The number of steps from one measurement to the next.
    """

    def __init__(self) -> None:
        self.stride = 1
        self._values = {name: array("q") for name in _NAMES}

    def __len__(self) -> int:
        return len(self._values["step"])

    def add(self, sample: MemorySample) -> None:
        """Add the measurement of a step."""
        for name, values in self._values.items():
            one = sum(sample.children.values()) if name == "children" else getattr(sample, name)
            values.append(one or 0)
        if len(self) >= _MOST_SAMPLES:
            self._values = {name: values[::2] for name, values in self._values.items()}
            self.stride *= 2

    def clear(self) -> None:
        """Forget all measurements."""
        self._values = {name: array("q") for name in _NAMES}

    def growth(self) -> dict[str, Growth]:
        """Fit the growth of each measurement over the newer half of the steps, at least 24 of them."""
        first = len(self) - max(2 * LEAST_POINTS, len(self) // 2)
        recent = {name: values[max(0, first) :].tolist() for name, values in self._values.items()}
        steps = recent.pop("step")
        return {
            name: fit_growth(steps, values, least_total=_LEAST_TOTALS.get(name, 1 << 20))
            for name, values in recent.items()
        }
