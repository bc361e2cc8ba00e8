"""The peak resident memory of this process, from the kernel's counter, which misses no short peak."""

import sys
from pathlib import Path

import psutil

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # proc(5): since Linux 4.0, resets the peak to the current resident memory


def resident_bytes() -> int:
    """Return the current resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the peak resident memory in bytes since the last reset, or since the process started without one."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes, other systems in KiB


def reset_peak() -> bool:
    """Reset the peak to the current resident memory.

    Returns:
        Whether the system supports a reset: only Linux with a writable /proc does.
    """
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # not Linux, or a container that mounts /proc read-only
        return False
    return True
