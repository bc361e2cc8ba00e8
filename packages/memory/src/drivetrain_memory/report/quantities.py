"""Numbers as people read them."""

import math


def bytes_text(size_bytes: float) -> str:
    """Return a size such as "1.50 GB"; units of 1000, as torch and the makers of devices count."""
    if math.isnan(size_bytes):
        return "-"
    size = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}" if abs(size) < 999.5 else f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"


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
