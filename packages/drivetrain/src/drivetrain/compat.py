"""The private names of torch that this package uses, but for those of the counter in `flops/compat.py`.

torch has no public API for them. They are the same in torch 2.9 to 2.15; tests/drivetrain/test_compat.py holds each
one to what is relied on, and docs/platforms.md lists them.
"""

from collections.abc import Sequence
from typing import Any


def schedulers_in(scheduler: Any) -> Sequence[Any]:
    """Return the schedulers that a `SequentialLR` or `ChainedScheduler` is made of; none for another one."""
    return getattr(scheduler, "_schedulers", ())


def milestones_of(scheduler: Any) -> Sequence[int]:
    """Return the steps at which a `SequentialLR` goes on to its next scheduler; none for another one."""
    return getattr(scheduler, "_milestones", ())
