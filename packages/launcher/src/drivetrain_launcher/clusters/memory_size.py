"""Sizes of memory as text, such as "64GB"."""

import re

from drivetrain_launcher.errors import LaunchError

_UNITS = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)", re.ASCII | re.IGNORECASE)


def memory_bytes(text: str) -> int:
    """Return the number of bytes that a text states.

    Args:
        text: A number and a unit: KB, MB, GB or TB for powers of 1000, KiB, MiB, GiB or TiB for powers of 1024.

    Raises:
        LaunchError: The text has another form, or states less than one byte.
    """
    form = _FORM.fullmatch(text.strip())
    size = 0 if form is None else int(float(form[1]) * _UNITS[form[2].upper()])
    if size < 1:
        raise LaunchError(f"memory {text!r}: say a number and a unit, such as 64GB, 64GiB or 512MB")
    return size
