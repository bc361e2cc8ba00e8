"""The peak of the memory that this process itself takes: anonymous pages, sampled by a process beside it.

Linux keeps a peak of all resident pages alone. Those of files are most of them, the code of libraries above all, and
the system drops them and reads them again whenever it likes: they say nothing about what a test allocates. A sample
takes some 50 us, and 4 MiB take longer than that to fill.
"""

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass

_SAMPLER = """
import select, sys
status = open("/proc/%s/status" % sys.argv[1])
def anonymous():
    status.seek(0)
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
most = anonymous()
print(most, flush=True)
while not select.select([sys.stdin], [], [], 0.0005)[0]:
    most = max(most, anonymous())
most = max(most, anonymous())  # what is still held, however rarely the system let this process run
print(most)
"""


_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 2**20  # the number of the option, and of it the blocks that go back


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the process held of its own when sampling began, in MiB, and the process that samples."""

    own: float
    sampler: "subprocess.Popen[str]"


def reset_peak() -> Held:
    """Begin to sample; what is held now.

    From here on the C library gives large blocks back when they are freed. It would soon keep those of many MiB for
    later, some in each thread, and which of them are kept differs from run to run.
    """
    if hasattr(library := ctypes.CDLL(None), "mallopt"):  # glibc, whose peak this is
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.malloc_trim(0)
    sampler = subprocess.Popen(
        [sys.executable, "-IS", "-c", _SAMPLER, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sampler.stdout is not None
    return Held(own=int(sampler.stdout.readline()) / 1024, sampler=sampler)


def peak_above(before: Held) -> float:
    """How much memory of its own the process held at most above what it held when sampling began, in MiB."""
    most, _ = before.sampler.communicate()
    return int(most) / 1024 - before.own
