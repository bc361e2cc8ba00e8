"""Numbers as people read them."""

import math
from collections.abc import Iterable

from drivetrain_messages import format_size


def highest(values: Iterable[float], *, default: float = 0.0) -> float:
    """Return the highest number, ignoring NaN; without any number, the default."""
    return max((value for value in values if not math.isnan(value)), default=default)


def bytes_text(size_bytes: float) -> str:
    """Return a size such as "1.50 GB"; "-" for NaN, a size that is not known."""
    return "-" if math.isnan(size_bytes) else format_size(size_bytes)


def seconds_text(seconds: float) -> str:
    """Return a duration such as "2 h 05 min" or "3.2 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def number_text(name: str, value: float) -> str:
    """Return the number of a column with the unit that its name ends with."""
    if math.isnan(value):
        return "-"
    if name.endswith("_bytes"):
        return bytes_text(value)
    for suffix, unit in (("_watts", " W"), ("_celsius", " °C"), ("_percent", " %")):
        if name.endswith(suffix):
            return f"{value:.0f}{unit}"
    return f"{value:g}"
