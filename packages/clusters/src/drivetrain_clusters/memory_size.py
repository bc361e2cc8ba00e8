"""Sizes of memory as text, such as "64GB"."""

from drivetrain_clusters.errors import ClusterError
from drivetrain_messages import parse_size


def memory_bytes(text: str) -> int:
    """Return the number of bytes that a text states.

    Args:
        text: A number and a unit: KB, MB, GB or TB for powers of 1000, KiB, MiB, GiB or TiB for powers of 1024.

    Raises:
        ClusterError: The text has another form, or states less than one byte.
    """
    try:
        size = parse_size(text)
    except ValueError:
        size = 0
    if size < 1:
        raise ClusterError(f"memory {text!r}: say a number and a unit, such as 64GB, 64GiB or 512MB")
    return size
