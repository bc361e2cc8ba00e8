"""Read the largest size of an export's files."""

from drivetrain_messages import SIZE_UNITS, parse_size


def parse_shard_size(max_shard_size: int | str) -> int:
    """Return the bytes of `max_shard_size`, such as 1000, "5GB" or "512MiB".

    Raises:
        ValueError: The size is invalid or not above 0; the message says what is allowed.
    """
    try:
        size_bytes = parse_size(max_shard_size)
    except ValueError:
        size_bytes = 0
    if size_bytes < 1:
        raise ValueError(
            f"max_shard_size={max_shard_size!r}: must be a number of bytes above 0, or one with a unit such as "
            f"'5GB' or '512MiB' (units: {', '.join(SIZE_UNITS)})"
        )
    return size_bytes
