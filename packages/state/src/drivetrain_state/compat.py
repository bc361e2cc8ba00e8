"""The private names of torch that this package uses, in one place.

torch has no public API for them. They are the same in torch 2.9 to 2.15; tests/state/test_compat.py holds each one
to what is relied on, and docs/platforms.md lists them.
"""

from torch.autograd import profiler
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
    _resolve_process_group,  # pyright: ignore[reportPrivateUsage]
)

# Returns the store in which the ranks of the default process group met.
default_store = _get_default_store

# Returns the process group of a name; RuntimeError if it has ended.
group_by_name = _resolve_process_group


def is_profiled() -> bool:
    """Return whether torch's profiler records at present, by whoever started it."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
