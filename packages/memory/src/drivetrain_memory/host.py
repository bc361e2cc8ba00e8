"""The peak of this process's resident memory, as the kernel counts it: nothing is sampled, nothing is missed."""

import sys
from pathlib import Path

import psutil

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # proc(5): since Linux 4.0, sets the peak to what is resident now


def resident_bytes() -> int:
    """What is resident now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most that was resident since the last reset, or since the process started where none is possible."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def reset_peak() -> bool:
    """Let the peak start again from what is resident now; whether the system can: Linux, where /proc is writable."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # another system, or a container that mounts /proc read-only
        return False
    return True
