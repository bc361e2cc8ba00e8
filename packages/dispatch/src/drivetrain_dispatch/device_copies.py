"""The kinds of devices that copy in the order of the calls."""

# XLA, also on TPUs, executes in the order of the calls; torch has no side streams of Apple's devices.
_IN_ORDER = ("cpu", "mps", "tpu", "xla")


def copies_aside(kind: str) -> bool:
    """Return whether devices of a kind copy from pinned memory on a side stream, beside what they compute."""
    return kind not in _IN_ORDER
