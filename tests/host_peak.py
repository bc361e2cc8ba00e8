"""The peak of the memory that this process itself takes, as Linux keeps it.

Pages of files are left out, the code of libraries above all: the system drops them while a process of the pool waits
and reads them again in whatever test comes next.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the process holds: memory of its own and pages of files, in MiB."""

    own: float
    of_files: float


def reset_peak() -> Held:
    """Forget the peak so far; what is held now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    held = _status()
    return Held(own=held["VmRSS"] - held["RssFile"], of_files=held["RssFile"])


def peak_above(before: Held) -> float:
    """How much memory of its own the process held at most above what it held when the peak was reset, in MiB.

    Linux keeps the peak of both kinds together. Pages of files that have come in the meantime are taken for part of
    it, so that it may be told too low by them, and never too high.
    """
    held = _status()
    return held["VmHWM"] - max(held["RssFile"], before.of_files) - before.own


def _status() -> dict[str, float]:
    with open("/proc/self/status") as lines:
        fields = [line.split() for line in lines if line.startswith(("VmHWM:", "VmRSS:", "RssFile:"))]
    return {name.rstrip(":"): int(number) / 1024 for name, number, _ in fields}
