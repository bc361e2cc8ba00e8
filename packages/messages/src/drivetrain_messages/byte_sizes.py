"""Sizes in bytes as people write and read them, such as "20GB"."""

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", re.ASCII)
SIZE_UNITS = {"B": 1} | {
    f"{prefix}{kind}": base**power
    for kind, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB")
_FACTORS = {unit.lower(): factor for unit, factor in SIZE_UNITS.items()}


def parse_size(size: int | str) -> int:
    """Return the bytes of a size such as 1000, "5GB" (powers of 1000) or "512MiB" (powers of 1024) in any case.

    Raises:
        ValueError: The size is invalid.
    """
    if type(size) is int and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(
            f"{size!r} is no size: give one with a unit such as '24GB' or '512MiB', or an int of bytes (units: "
            f"{', '.join(SIZE_UNITS)})"
        )
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def format_size(size_bytes: float) -> str:
    """Return a size in the largest unit of powers of 1000 that keeps the number above 1, such as "1.50 GB"."""
    size, unit = float(size_bytes), 0
    while unit < len(_DECIMAL_UNITS) - 1 and abs(round(size, 2 if unit else 0)) >= 1000:
        size, unit = size / 1000, unit + 1
    return f"{size:.2f} {_DECIMAL_UNITS[unit]}" if unit else f"{size:.0f} B"
