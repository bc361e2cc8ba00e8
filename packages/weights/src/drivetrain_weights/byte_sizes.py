"""Sizes in bytes as people write and read them, such as "20GB"."""

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
SIZE_UNITS = {"B": 1} | {
    f"{prefix}{kind}": base**power
    for kind, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
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


def format_size(size_bytes: int) -> str:
    """Return a size in the largest unit of powers of 1000 that is not above it, such as "1.50 GB"."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} B"
