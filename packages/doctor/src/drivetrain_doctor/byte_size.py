"""Numbers of bytes as people read them."""


def byte_size(size: float) -> str:
    """Return a number of bytes in GiB, or in MiB if it is less than one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
